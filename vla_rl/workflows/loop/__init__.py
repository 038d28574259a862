"""The closed loop: real episodes, world model, trust, RL in imagination, gate, repeat; and its controls."""
