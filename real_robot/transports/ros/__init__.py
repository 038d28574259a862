"""ROS 1 without a ROS installation: Debian's packages, unpacked without root, and a master of our own."""
