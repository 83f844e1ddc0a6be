"""What holds for every test."""

from __future__ import annotations

import asyncio.selector_events
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

settings.register_profile(
    "any machine", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


_BYTECODE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Make Ctrl-C work, and Python quick to start, in the processes that tests start."""
    _let_ctrl_c_work()
    _watch_closing_loops()
    _keep_bytecode(config)
    _show_tracebacks_plainly()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what was collected out of all garbage collection.

    Thousands of tests and their modules live to the end. Looking through them anew costs half a second in each full
    collection, and many tests ask for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


ONE_AFTER_ANOTHER = {
    "browser": ("tests/browser/",),
    "containers": ("tests/compose/",),
    "muster up": ("tests/integration/test_docs.py", "tests/integration/test_stack.py"),
}
"""Files of which no two run at once: they share one stack, or start `muster up`, two of which may choose the same ports
for operations when they start in the same moment."""


class ByStack(LoadFileScheduling):
    """A process is given whole files, and together those that may not run at once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((name for name, files in ONE_AFTER_ANOTHER.items() if file.startswith(files)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """What ``--dist loadfile`` means here."""
    return ByStack(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that may take longest, so that no process is left with one of them at the end."""
    timeouts: Counter[Path] = Counter()
    for item in items:
        marker = item.get_closest_marker("timeout")
        timeouts[item.path] = max(timeouts[item.path], marker.args[0] if marker else 0)
    items.sort(key=lambda item: -timeouts[item.path])


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


@pytest.fixture(autouse=True)
def _logs_are_printed() -> None:
    """However a test before, within whose process a library took its first handle, has configured structlog."""
    structlog.reset_defaults()


_left_open: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test whose event loop was closed while it had connections.

    Their sockets are left to the garbage collector, which complains in the middle of a later test.
    """
    try:
        result = yield
    finally:  # or the next test would be blamed
        connections = ", ".join(_left_open)
        _left_open.clear()
    if connections:
        pytest.fail(f"{item.nodeid}: open when the event loop closed: {connections}", pytrace=False)
    return result


def _watch_closing_loops() -> None:
    class_: Any = asyncio.selector_events.BaseSelectorEventLoop
    close = class_.close

    def check_and_close(self: Any) -> None:
        if not self.is_closed():
            for transport in list(self._transports.values()):
                if transport._sock is not None:
                    _left_open.append(f"{transport!r} to {transport.get_extra_info('peername')}")
        close(self)

    class_.close = check_and_close
