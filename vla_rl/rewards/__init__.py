"""Rewards: what says, from what is seen, whether a task has been carried out. The simulator's, or a learned one."""
