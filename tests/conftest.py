"""For all tests: no example of a property test fails for being slow, on whatever machine; Ctrl-C works as usual."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As a shell starts what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
