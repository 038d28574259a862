"""Policy server, robot bridge, safety and correction recording. Not implemented yet."""
