"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Make Ctrl-C work again, here and in the processes that tests start.

    A shell starts what it puts into the background with SIGINT ignored, and that is inherited: then tests that stop a
    process as a person would, by Ctrl-C, would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
