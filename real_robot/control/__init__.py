"""The control loop next to the robot, playing of chunks, and the safety supervisor."""
