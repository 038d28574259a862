"""`vla-rl plan`: what a run would take on other hardware, played through from its stages' costs."""
