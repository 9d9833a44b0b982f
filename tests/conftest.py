"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is or how busy.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
