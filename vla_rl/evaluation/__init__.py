"""Success rates on numbered initial states, paired comparisons, intervals, and the gate on imagined gains."""
