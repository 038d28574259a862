"""RL, behavior cloning and what both stand on: optimizers, checkpoints, metrics, memory."""
