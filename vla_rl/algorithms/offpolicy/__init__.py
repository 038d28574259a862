"""Learning from logged episodes without an environment: transitions, a critic, and what to clone of them."""
