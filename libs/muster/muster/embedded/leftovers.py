"""Finding and killing leftover processes of a stack.

Why processes are found by a mark in their environment: names and pids are reused and rewritten; a variable with the
stack's random id is inherited by every descendant and by no other process.
"""

from __future__ import annotations

import os
import signal

import psutil
import structlog

from muster.embedded.process import PROCESS_MARK, STACK_MARK

_log = structlog.get_logger()
_GONE_TIMEOUT_S = 3.0


def find_marked(stack_id: str, process: str | None = None) -> list[psutil.Process]:
    """Find the processes that carry this stack's mark; with ``process``, only those of that process of the stack.

    Never the calling process itself nor its ancestors: `muster up` may be run by a process within a stack.
    """
    own = psutil.Process()
    excluded = {own.pid, *(parent.pid for parent in own.parents())}
    found = []
    for candidate in psutil.process_iter():
        if candidate.pid in excluded:
            continue
        try:
            environment = candidate.environ()
        except (psutil.Error, OSError):
            continue  # gone, a zombie, or another user's and so not ours
        if environment.get(STACK_MARK) == stack_id and process in (None, environment.get(PROCESS_MARK)):
            found.append(candidate)
    return found


def kill_marked(stack_id: str, process: str | None = None) -> int:
    """Kill the marked processes and their descendants (which may have overwritten their environment).

    Returns their number. Blocks for at most a few seconds.
    """
    victims: dict[int, psutil.Process] = {}
    for marked in find_marked(stack_id, process):
        victims[marked.pid] = marked
        try:
            victims.update((child.pid, child) for child in marked.children(recursive=True))
        except psutil.Error:
            continue  # it ended meanwhile; its children ended too or carry the mark themselves
    victims.pop(os.getpid(), None)
    for victim in victims.values():
        try:
            victim.send_signal(signal.SIGKILL)  # psutil compares start times: a reused pid is not hit
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            _log.warning("leftover_cannot_be_killed", pid=victim.pid, stack_id=stack_id)
    psutil.wait_procs(list(victims.values()), timeout=_GONE_TIMEOUT_S)
    return len(victims)


def reap_zombies(seen_before: frozenset[int]) -> frozenset[int]:
    """Reap children that no other code waits for; returns the zombies that remain.

    Orphans are reparented to this process when a guardian is killed. Only a zombie that also existed at the last call
    is reaped: code that started a process and waits for it has had its chance by then.
    """
    zombies = set()
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                zombies.add(child.pid)
                if child.pid in seen_before:
                    os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue  # reaped by other code
    return frozenset(zombies - seen_before)
