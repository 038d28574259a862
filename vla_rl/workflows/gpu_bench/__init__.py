"""`vla-rl bench gpu`: is what a GPU computes right, how fast is it, and how much memory does it take."""
