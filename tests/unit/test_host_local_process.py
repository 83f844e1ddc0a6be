"""A process of this machine is killed by the kernel, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from serve_replica_host.adapters import local_process
from serve_replica_host.adapters.local_process import LocalProcess


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_stopped_process_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    process = LocalProcess(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)

    assert process.kill()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not process.kill()
    process.close()
    process.close()


def test_a_process_that_was_gone_before_is_said_to_be_gone(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait(10)

    assert not LocalProcess(sleeper.pid).kill()


def test_without_a_handle_the_pid_must_do(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_pid: int) -> int:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    process = LocalProcess(sleeper.pid)

    assert process.kill()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not process.kill()


def test_where_the_system_has_no_handles_the_pid_must_do(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_process, "_HAS_HANDLES", False)

    assert LocalProcess(sleeper.pid).kill()
    assert sleeper.wait(10) == -signal.SIGKILL
