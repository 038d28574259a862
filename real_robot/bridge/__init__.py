"""Between a robot's topics and observations and actions: contracts, messages, transports."""
