"""One driver for a robot, known to all on its graph, and a robot that stands when its driver dies."""
