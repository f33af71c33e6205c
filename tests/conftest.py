"""What all tests share: one Hypothesis profile, and no torch threads to fight over the cores."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# Deadlines measure the machine's other work; examples found once are kept in .hypothesis and tried again.
settings.register_profile(
    "plait", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("plait")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported by any test; ranks started by tests inherit it

# A suite that was started in the background inherits an ignored SIGINT and would pass it on to what it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
