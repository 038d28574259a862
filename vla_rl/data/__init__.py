"""Demonstrations and rollouts on disk (LeRobotDataset v3), and batches of them for behavior cloning."""
