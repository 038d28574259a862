"""Policies of LeRobot: SmolVLA, pi0 and pi0.5 under RL, any other to evaluate."""
