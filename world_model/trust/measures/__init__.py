"""What is measured of a world model: images, outcomes, response to actions, horizon."""
