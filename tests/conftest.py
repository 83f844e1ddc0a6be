"""What holds for every test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


_BYTECODE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Make Ctrl-C work, and Python quick to start, in the processes that tests start."""
    _let_ctrl_c_work()
    _keep_bytecode(config)
    _show_tracebacks_plainly()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take away what was only for this run."""
    if _BYTECODE in config.stash:
        shutil.rmtree(config.stash[_BYTECODE], ignore_errors=True)


def _let_ctrl_c_work() -> None:
    """Here as in the processes that tests start.

    A shell starts what it puts into the background with SIGINT ignored, and that is inherited: then tests that stop a
    process as a person would, by Ctrl-C, would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _keep_bytecode(config: pytest.Config) -> None:
    """In a directory of this run, where it is not wanted beside the sources.

    Otherwise each of the hundreds of processes would compile all of its libraries anew, Ray's workers above all.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        directory = tempfile.mkdtemp(prefix="muster-test-bytecode-")
        os.environ["PYTHONPYCACHEPREFIX"] = config.stash[_BYTECODE] = directory


def _show_tracebacks_plainly() -> None:
    """Where logs are not configured, an error would be drawn with all local variables.

    That takes a second and more of a busy loop, in which a leader loses its lease and a request its deadline.
    """
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
