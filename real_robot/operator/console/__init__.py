"""The operator console: a web page served by the robot's process, from which a person watches and takes over."""
