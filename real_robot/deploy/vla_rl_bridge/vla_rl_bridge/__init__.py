"""The bridge's ROS 2 node."""
