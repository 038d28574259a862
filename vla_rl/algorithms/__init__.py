"""RL algorithms: advantages, losses, the learner."""
