"""Child processes, played by real ones: what they inherit and report, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_common.runtime.child_process import (
    STABLE_S,
    ChildLink,
    ChildProcess,
    RestartBackoff,
    describe_exit,
)

PIPE = asyncio.subprocess.PIPE
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


class Children:
    def __init__(self) -> None:
        self.started: list[ChildProcess] = []

    async def start(
        self, script: str, *arguments: str, link: ChildLink | None = None, env: dict[str, str] | None = None
    ) -> ChildProcess:
        process = await ChildProcess.start(
            [sys.executable, "-I", "-c", script, *arguments], env=env or {}, link=link, stdout=PIPE
        )
        self.started.append(process)
        return process


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    made = Children()
    yield made
    for process in made.started:
        process.kill_group()
        await process.ended()
        await process.stdout.read()


async def output(process: ChildProcess) -> str:
    async with asyncio.timeout(30):
        return (await process.stdout.read()).decode().strip()


async def test_a_child_inherits_its_environment_its_standard_streams_and_its_link_alone(
    children: Children,
) -> None:
    ours = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(ours, True)
    link = ChildLink()
    script = (
        "import os, sys; fds = os.listdir('/proc/self/fd'); "
        "print(sorted(int(fd) for fd in fds if os.path.exists(f'/proc/self/fd/{fd}')), os.environ.get('A'), "
        "os.environ.get('PATH'), os.getsid(0) == os.getpid(), os.path.realpath('/proc/self/fd/0'))"
    )
    try:
        fd = link.child_fd
        process = await children.start(script, link=link, env={"A": "1"})
        assert await output(process) == f"{[0, 1, 2, fd]} 1 None True /dev/null"
    finally:
        os.close(ours)
        link.close()


async def test_a_child_reports_a_number_and_one_that_ends_before_reports_none(children: Children) -> None:
    report = "import os, sys; fd = int(sys.argv[1]); os.write(fd, b'12'); os.write(fd, b'345\\n')"
    for script, expected in ((report, 12345), ("pass", None)):
        link = ChildLink()
        process = await children.start(script, str(link.child_fd), link=link)
        async with asyncio.timeout(30):
            assert await link.read_number() == expected
            assert await process.ended() == 0
        link.close()


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


async def test_a_child_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        await ChildProcess.start(["/nowhere"], env={}, link=ChildLink())
    assert descriptors() == before


async def test_a_child_that_ignores_a_signal_gets_the_next_one(children: Children) -> None:
    process = await children.start(DEAF)
    await process.stdout.readline()
    assert not await process.stop((signal.SIGTERM, 0.05))
    assert not process.has_ended
    assert await process.stop((signal.SIGTERM, 0.05), (signal.SIGKILL, 30))
    assert process.has_ended
    assert await process.ended() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)


async def test_a_group_is_killed_with_what_the_child_has_started(children: Children) -> None:
    script = "import subprocess; print('up', flush=True); subprocess.run(['sleep', '600'])"
    process = await children.start(script)
    await process.stdout.readline()
    process.kill_group()
    assert await output(process) == ""  # the end of the last process that has the pipe
    assert await process.ended() == -signal.SIGKILL
    process.kill_group()


def test_a_first_quick_death_needs_no_wait_and_a_crash_loop_is_slowed_down() -> None:
    backoff = RestartBackoff()
    assert [backoff.on_ended(0.1) for _ in range(8)] == [0, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert backoff.crashes == 8
    assert backoff.on_ended(STABLE_S) == 0
    assert [backoff.on_ended(0.1) for _ in range(2)] == [0, 0.2]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (137, "killed by SIGKILL"),
        (-15, "killed by SIGTERM"),
        (255, "exited with code 255"),
    ],
)
def test_exit_codes_are_described(code: int, text: str) -> None:
    assert describe_exit(code) == text
