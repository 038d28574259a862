"""The robot's own model, from its URDF or MJCF: joint limits, distances to itself and to its cell, singularities."""
