"""The person beside the robot: devices, console, who is in control, recordings."""
