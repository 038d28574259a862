"""One person beside several robots: a queue of requests for help, and the process that hands control over."""
