"""How events read: what a change of one object means for people.

Why apart from the events themselves: words change for other reasons than which events there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from serve_common.names import BackendTag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Backend, BackendVersion, HostRecord, Replica, ReplicaState
from serve_controller.core.transitions import WANTED

MESSAGE_LENGTH_MAX: Final = 500


def cut(text: str, length_max: int = MESSAGE_LENGTH_MAX) -> str:
    """``text``, or its beginning and a sign that there is more."""
    return text if len(text) <= length_max else f"{text[: length_max - 1]}…"


def last_line(error: str) -> str:
    """What a traceback comes to."""
    lines = error.strip().splitlines()
    return lines[-1].strip() if lines else ""


def name_of(version: BackendVersion) -> str:
    """A version for people: as the user named it, or the number of its code."""
    return version.version or str(version.code_version)


def host_news(known: HostRecord | None, host: HostRecord) -> Iterator[tuple[str, str]]:
    """State and message of what happened to a host."""
    if known is None:
        yield "known", "is heard of for the first time"
    was_draining = known is not None and known.draining
    if host.draining and not was_draining:
        yield "draining", "its replicas move to other hosts and none is placed there"
    elif was_draining and not host.draining:
        yield "undrained", "replicas are placed there again"


def backend_news(known: Backend | None, backend: Backend, *, has_failed: bool) -> Iterator[tuple[str, str]]:
    """State and message of what happened to a backend; ``has_failed`` says that its goal failed just now."""
    if known is None:
        return
    error = last_line(backend.last_error)
    is_same_aim = known.target == backend.target and known.goal_id == backend.goal_id
    if backend.start_failures > known.start_failures:
        allowed = backend.target.backend_config.max_constructor_retry_count
        count = f"{backend.start_failures} starts failed (a goal fails at {allowed})"
        yield "failing", f"version {name_of(backend.target)}: {count}: {error}"
    elif known.start_failures and not backend.start_failures and is_same_aim and not has_failed:
        yield "recovered", f"version {name_of(backend.target)} starts again"
    if backend.halted and not known.halted:
        yield "halted", f"nothing is started until the next deploy: {error}"
    if backend.kept is not None and backend.kept != known.kept:
        kept = f"replicas of version {name_of(backend.kept)} that serve are kept"
        yield "kept", f"version {name_of(backend.target)} is wanted again; {kept}: {error}"
    elif _went_back(known, backend):
        yield "went back", f"version {name_of(backend.target)} is put back: {error}"


def _went_back(known: Backend, backend: Backend) -> bool:
    """Whether what last succeeded was made the target again, under the same goal: no command did it."""
    if known.last_good is None or known.goal_id != backend.goal_id or known.target == backend.target:
        return False
    number = backend.target.config_version
    return msgspec.structs.replace(known.last_good, config_version=number) == backend.target


class ReplicaWords:
    """What one change means for replicas. Counts what it needs once, however many replicas changed."""

    def __init__(self, before: Checkpoint, after: Checkpoint) -> None:
        self._before = before
        self._after = after
        self._num_wanted: dict[BackendTag, int] = {}

    def of_move(self, known: Replica | None, replica: Replica) -> str:
        """Of a replica that came into its state from that of ``known`` (None: it is new)."""
        was = None if known is None else known.state
        match replica.state:
            case ReplicaState.SHOULD_START:
                return replica.message or "waits for a host"
            case ReplicaState.STARTING:
                return f"starts on {replica.host_id}"
            case ReplicaState.RUNNING if was is ReplicaState.UPDATING:
                return f"runs with its new configuration on {replica.host_id}"
            case ReplicaState.RUNNING if was is ReplicaState.UNHEALTHY:
                return f"is healthy again on {replica.host_id}"
            case ReplicaState.RUNNING:
                return f"runs on {replica.host_id}"
            case ReplicaState.UPDATING:
                return f"is given a new configuration on {replica.host_id}"
            case ReplicaState.UNHEALTHY:
                return replica.message or f"its health check fails on {replica.host_id}"
            case ReplicaState.SHOULD_STOP:
                return f"is to stop: {replica.message or self._why_stopped(replica, was)}"
            case ReplicaState.STOPPING:
                return f"finishes what it has on {replica.host_id}"
            case ReplicaState.STOPPED:
                return "is gone"

    def of_end(self, replica: Replica) -> str:
        """Of a replica whose row is gone; ``replica`` is as it was before."""
        if replica.state not in WANTED:
            return "has stopped"
        if replica.state is ReplicaState.SHOULD_START:
            return f"is not started: {self._why_stopped(replica, replica.state)}"
        ended = f"ended on {replica.host_id} while it was {replica.state.value}"
        known = self._before.backends.get(replica.backend_tag)
        backend = self._after.backends.get(replica.backend_tag)
        if known is not None and backend is not None and backend.start_failures > known.start_failures:
            return f"{ended}: {last_line(backend.last_error)}"
        return ended

    def _why_stopped(self, replica: Replica, was: ReplicaState | None) -> str:
        backend = self._after.backends.get(replica.backend_tag)
        host = None if replica.host_id is None else self._after.hosts.get(replica.host_id)
        if backend is None or backend.deleting:
            return f"{replica.backend_tag} is deleted"
        if backend.halted:
            return f"{replica.backend_tag} is halted"
        if host is not None and host.draining:
            return f"the host {host.host_id} is drained"
        if replica.code_version != backend.target.code_version:
            versions = backend.versions()
            old = next((v for v in versions if v.code_version == replica.code_version), None)
            former = str(replica.code_version) if old is None else name_of(old)
            return f"version {former} is replaced by {name_of(backend.target)}"
        if was is ReplicaState.UNHEALTHY:
            return "its health check fails"
        if self._count_wanted(replica.backend_tag) >= backend.num_wanted:
            return f"{backend.num_wanted} replicas are wanted"
        return "another one is started in its place"

    def _count_wanted(self, tag: BackendTag) -> int:
        if tag not in self._num_wanted:
            replicas = self._after.replicas_of(tag).values()
            self._num_wanted[tag] = sum(replica.state in WANTED for replica in replicas)
        return self._num_wanted[tag]
