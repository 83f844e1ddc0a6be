"""The life of one replica on its host as a table, and what the runtime tells of replicas."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaStatus
from serve_replica_host.core.state import HeldReplica, HostState, forget_replica, put_replica, trim_error


class ReplicaEventKind(Enum):
    """What can happen to a replica."""

    CONSTRUCTED = "constructed"
    """Import and constructor are done, and its subject is subscribed."""
    START_FAILED = "start_failed"
    """Import or constructor raised or took too long, or the process ended before they were done."""
    CHECKS_FAILED = "checks_failed"
    """Its health check failed as often as is allowed."""
    CHECK_PASSED = "check_passed"
    OMITTED = "omitted"
    """The goal leaves it out, or the host itself leaves."""
    PROCESS_ENDED = "process_ended"


class Gone(Enum):
    """The place after every status: the host forgets the replica."""

    GONE = "gone"


_S = ReplicaStatus
_H = ReplicaEventKind

TRANSITIONS: Final[dict[tuple[ReplicaStatus, ReplicaEventKind], ReplicaStatus | Gone]] = {
    (_S.STARTING, _H.CONSTRUCTED): _S.RUNNING,
    (_S.STARTING, _H.START_FAILED): _S.FAILED,
    (_S.STARTING, _H.PROCESS_ENDED): _S.FAILED,
    (_S.STARTING, _H.OMITTED): _S.DRAINING,
    (_S.RUNNING, _H.CHECKS_FAILED): _S.UNHEALTHY,
    (_S.RUNNING, _H.PROCESS_ENDED): _S.DEAD,
    (_S.RUNNING, _H.OMITTED): _S.DRAINING,
    (_S.UNHEALTHY, _H.CHECK_PASSED): _S.RUNNING,
    (_S.UNHEALTHY, _H.PROCESS_ENDED): _S.DEAD,
    (_S.UNHEALTHY, _H.OMITTED): _S.DRAINING,
    (_S.DRAINING, _H.PROCESS_ENDED): Gone.GONE,
    (_S.FAILED, _H.OMITTED): Gone.GONE,
    (_S.DEAD, _H.OMITTED): Gone.GONE,
}
"""What changes; every pair that is not here changes nothing."""


def after(status: ReplicaStatus, happening: ReplicaEventKind) -> ReplicaStatus | Gone:
    """The status that follows; the same one when this happening means nothing (any more) in it."""
    return TRANSITIONS.get((status, happening), status)


TEXT_LENGTH_MAX: Final = 16_000
"""Characters of an error or a reason."""

# The bounds hold where events are decoded: whoever sends them may have been taken over by user code.
_Tag = Annotated[ReplicaTag, msgspec.Meta(max_length=200)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    replica_tag: _Tag


class Placed(_Event, frozen=True):
    """Its process runs."""

    pid: Annotated[int, msgspec.Meta(ge=0, le=2**22)]
    was_spare: bool = False
    """It was started ahead, and had been ready."""
    process: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9-]{0,100}\Z")] = ""
    """Its name in the names of its files of metrics; empty for its pid."""
    address: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9.:%_-]{0,100}\Z")] = ""
    """Of its machine; empty for the host's."""


class Waits(_Event, frozen=True):
    """It has no process yet; ``reason`` is for people."""

    reason: _Text
    is_process_starting: bool = False
    """Its process is on its way; otherwise it waits for resources, which keeps no other start waiting."""


class Constructed(_Event, frozen=True):
    """It serves, with the configuration of that version."""

    config_version: _Version


class ReplicaStartFailed(_Event, frozen=True):
    """Import or constructor raised; its process may still be there."""

    error: _Text


class Reconfigured(_Event, frozen=True):
    """``reconfigure`` ended; ``error`` is None when it was applied."""

    config_version: _Version
    error: _Text | None


class HealthCheckSent(_Event, frozen=True):
    """The question for its health has left the host: the time to answer begins."""


class HealthChecked(_Event, frozen=True):
    """A health check answered; ``error`` is None when it passed."""

    error: _Text | None


class Drained(_Event, frozen=True):
    """Nothing is in flight and nothing new can come."""


class ProcessEnded(_Event, frozen=True):
    """Its process is gone, or will never be; ``error`` tells how it ended."""

    error: _Text


ReplicaEvent = (
    Placed
    | Waits
    | Constructed
    | ReplicaStartFailed
    | Reconfigured
    | HealthCheckSent
    | HealthChecked
    | Drained
    | ProcessEnded
)


def apply_event(state: HostState, event: ReplicaEvent, now: float) -> HostState:
    """The state after ``event``. Events of replicas that the host no longer holds change nothing."""
    held = state.replicas.get(event.replica_tag)
    if held is None:
        return state
    changed = _changed(held, event, now)
    return forget_replica(state, held.tag) if changed is None else put_replica(state, changed)


def _changed(held: HeldReplica, event: ReplicaEvent, now: float) -> HeldReplica | None:
    match event:
        case Placed(pid=pid):
            told = "" if is_starting(held) else held.error
            return msgspec.structs.replace(held, pid=pid, is_process_starting=False, error=told)
        case Waits(reason=reason, is_process_starting=is_process_starting):
            return _waits(held, reason, is_process_starting=is_process_starting)
        case Constructed(config_version=version):
            if not is_starting(held):
                return held
            return msgspec.structs.replace(
                held,
                status=ReplicaStatus.RUNNING,
                is_process_starting=False,
                config_version=version,
                asked_config_version=max(version, held.asked_config_version),
                error="",
                check_at=now + held.goal.health_check_period_s,
            )
        case ReplicaStartFailed(error=error):
            return fail(held, error)
        case Reconfigured(config_version=version, error=error):
            return _reconfigured(held, version, error)
        case HealthCheckSent():
            answer_by = now + held.goal.health_check_timeout_s
            return msgspec.structs.replace(held, check_at=answer_by) if held.is_check_pending else held
        case HealthChecked(error=error):
            return _checked(held, error, now)
        case Drained():
            return msgspec.structs.replace(held, is_drained=True)
        case ProcessEnded(error=error):
            return _ended(held, error)


def is_starting(held: HeldReplica) -> bool:
    """True until it was constructed, failed, or was left out."""
    return held.status is ReplicaStatus.STARTING


def fail(held: HeldReplica, error: str) -> HeldReplica:
    """``held`` after its start failed; nothing changes when it does not start any more."""
    if not is_starting(held):
        return held
    return msgspec.structs.replace(held, status=ReplicaStatus.FAILED, error=trim_error(error))


def count_failed_check(held: HeldReplica, error: str) -> HeldReplica:
    """``held`` after one more health check failed or did not answer in time."""
    failed = held.checks_failed + 1
    status = held.status
    if failed >= held.goal.health_check_failure_threshold:
        following = after(held.status, ReplicaEventKind.CHECKS_FAILED)
        assert not isinstance(following, Gone), "a health check never removes a replica"
        status = following
    told = trim_error(error) if status is ReplicaStatus.UNHEALTHY else held.error
    return msgspec.structs.replace(held, status=status, checks_failed=failed, error=told)


def _waits(held: HeldReplica, reason: str, *, is_process_starting: bool) -> HeldReplica:
    if not is_starting(held):
        return held
    return msgspec.structs.replace(held, is_process_starting=is_process_starting, error=reason)


def _reconfigured(held: HeldReplica, version: int, error: str | None) -> HeldReplica:
    held = msgspec.structs.replace(held, is_reconfiguring=False, reconfigure_by=None)
    if error is not None:
        return msgspec.structs.replace(held, config_error_version=version, error=trim_error(error))
    return msgspec.structs.replace(
        held,
        config_version=max(version, held.config_version),
        config_error_version=0,
        error="" if held.config_error_version else held.error,
    )


def _checked(held: HeldReplica, error: str | None, now: float) -> HeldReplica:
    held = msgspec.structs.replace(
        held, is_check_pending=False, check_at=now + held.goal.health_check_period_s
    )
    if error is not None:
        return count_failed_check(held, error)
    following = after(held.status, ReplicaEventKind.CHECK_PASSED)
    assert not isinstance(following, Gone), "a health check never removes a replica"
    told = "" if held.status is ReplicaStatus.UNHEALTHY else held.error
    return msgspec.structs.replace(held, status=following, checks_failed=0, error=told)


def _ended(held: HeldReplica, error: str) -> HeldReplica | None:
    following = after(held.status, ReplicaEventKind.PROCESS_ENDED)
    if isinstance(following, Gone):
        return None
    if following is held.status:  # FAILED or DEAD already: keep what was told first
        return msgspec.structs.replace(held, has_process=False, is_process_starting=False)
    return msgspec.structs.replace(
        held, status=following, error=trim_error(error), has_process=False, is_process_starting=False
    )
