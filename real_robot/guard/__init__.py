"""The robot guard, which brakes when deploy dies, and the lock that allows a robot one driver."""
