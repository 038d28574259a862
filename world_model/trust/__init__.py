"""How far a world model can be trusted: figures, what they must reach before RL may start, and the page about them."""
