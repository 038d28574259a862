"""Where a camera is on or beside the robot, what its lens does, and the box the arm may move in."""
