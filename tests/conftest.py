"""What all tests share: Hypothesis searches without a clock, because machines are busy and no test asserts a time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")
