"""Transports: ROS 1, DDS as ROS 2 uses it, rclpy, rosbridge and LeRobot, behind one interface."""
