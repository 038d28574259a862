"""Ways to a robot's topics: ROS 1, DDS as ROS 2 uses it, and rosbridge, behind one interface."""
