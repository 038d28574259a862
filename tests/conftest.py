"""For all tests: no example of a property test fails for being slow, on whatever machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")
