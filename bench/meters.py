"""What the processes of a system cost while it is measured: CPU seconds and memory, by process.

Why by the marks of the embedded stack's supervisor, or the first processes of containers: Ray's processes rename
themselves and leave their session, yet descend from something that is known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Final, Self

import msgspec
import psutil

from muster.embedded.process import PROCESS_MARK, STACK_MARK
from serve_common.runtime import guardian

_LOOK_EVERY_S: Final = 0.1


class Usage(msgspec.Struct, kw_only=True):
    """Of one process, or of all that share a name."""

    cpu_s: float = 0.0
    rss_bytes: int = 0
    """At the end."""
    rss_growth_bytes: int = 0
    """From the start to the highest moment in between."""


class Meter:
    """Watches the processes of one system."""

    def __init__(self, find: Callable[[], Mapping[psutil.Process, str]]) -> None:
        """``find`` says which they are, each with its name."""
        self._find = find

    @classmethod
    def of_stack(cls, stack_id: str) -> Self:
        """Of an embedded stack."""
        return cls(lambda: named_processes(stack_id))

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[dict[str, Usage]]:
        """What is yielded is filled at the end."""
        usage: dict[str, Usage] = {}
        names = await asyncio.to_thread(self._find)
        cpu_before = {process: _cpu_s(process) for process in names}
        rss_before = {process: _rss_bytes(process) for process in names}
        highest = dict(rss_before)
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(_keep_looking(highest))
            try:
                yield usage
            finally:
                looking.cancel()
        for process, name in names.items():
            total = usage.setdefault(name, Usage())
            rss = _rss_bytes(process)
            total.cpu_s += max(0.0, _cpu_s(process) - cpu_before[process])
            total.rss_bytes += rss
            total.rss_growth_bytes = max(
                total.rss_growth_bytes, max(highest[process], rss) - rss_before[process]
            )


def named_processes(stack_id: str) -> dict[psutil.Process, str]:
    """All processes of an embedded stack; those that Ray started to run an actor are named after it."""
    marked: dict[psutil.Process, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get(STACK_MARK) == stack_id:
                marked[process] = environment.get(PROCESS_MARK, "?")
    return with_descendants(marked)


def with_descendants(named: Mapping[psutil.Process, str]) -> dict[psutil.Process, str]:
    """These and all that descend from them, which have their names but for actors of Ray."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    names: dict[psutil.Process, str] = {}
    todo = list(named.items())
    while todo:
        process, name = todo.pop()
        if process in names:
            continue
        names[process] = _own_name(process, name)
        todo += [(child, name) for child in children.get(process.pid, [])]
    return names


def _own_name(process: psutil.Process, name: str) -> str:
    with contextlib.suppress(psutil.Error, IndexError):
        title = process.cmdline()[0]
        if title.startswith("ray::IDLE"):
            return f"{name} (Ray)"
        if title.startswith("ray::"):
            return title.removeprefix("ray::").partition("(")[0].partition(".")[0].strip()
        program = process.name()
        if program in ("raylet", "gcs_server") or "ray/_private" in " ".join(process.cmdline()[:3]):
            return f"{name} (Ray)"
        if program == "haproxy":
            return "haproxy"
    return name


@contextlib.contextmanager
def suspended(stack_ids: Collection[str]) -> Iterator[None]:
    """Let the processes of other stacks stand still meanwhile, but for guardians, which end them if we end.

    Why: idle stacks of four systems wake up some 10,000 times a second together, which slows whatever is measured.
    """
    processes = [process for stack_id in stack_ids for process in named_processes(stack_id)]
    try:
        for process in processes:
            with contextlib.suppress(psutil.Error):  # it has ended
                if guardian.__file__ not in process.cmdline():
                    process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.resume()


async def _keep_looking(highest: dict[psutil.Process, int]) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        for process, before in list(highest.items()):
            highest[process] = max(before, _rss_bytes(process))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended
        return 0.0
    return float(times.user + times.system)


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
