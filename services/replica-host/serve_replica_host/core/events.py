"""The state transitions of a replica on its host, and the events of the runtime.

Why events are values: the runtime only passes them on; what they mean is decided here, in one thread, in order.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import msgspec

from serve_common.names import ReplicaTag
from serve_common.protocol.evaluation import RESULT_BYTES_MAX
from serve_common.protocol.reports import ReplicaStatus
from serve_replica_host.core.state import HostedReplica, HostState, forget_replica, put_replica, trim_error


class ReplicaEventKind(Enum):
    """Events that change a replica's status."""

    CONSTRUCTED = "constructed"
    """Import and constructor have succeeded, and its subject is subscribed."""
    START_FAILED = "start_failed"
    """Import or constructor raised or timed out, or the process ended before."""
    CHECKS_FAILED = "checks_failed"
    """Its health check failed as often as the threshold."""
    CHECK_PASSED = "check_passed"
    OMITTED = "omitted"
    """The goal omits it, or the host itself is leaving."""
    PROCESS_ENDED = "process_ended"


class Gone(Enum):
    """The final state: the host forgets the replica."""

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
"""Status changes; pairs that are not listed change nothing.

Why a table: events come late and out of order (a health check returns while the replica already drains), so what each
of them may change must be clear at a glance.

```
            CONSTRUCTED             CHECKS_FAILED
 STARTING ───────────────▶ RUNNING ◀────────────▶ UNHEALTHY
    │  │                    │    │  CHECK_PASSED      │
    │  └──▶ FAILED          │    └──────▶ DEAD ◀──────┘   PROCESS_ENDED
    │         START_FAILED  │
    └───────────────────────┴──▶ DRAINING ──▶ gone        OMITTED, then PROCESS_ENDED
```

FAILED and DEAD stay until the goal omits them, so that no report of them can be missed; then they are gone, once they
have no process any more.
"""


def after(status: ReplicaStatus, event: ReplicaEventKind) -> ReplicaStatus | Gone:
    """The status after ``event``; unchanged when the event does not apply to ``status``."""
    return TRANSITIONS.get((status, event), status)


TEXT_LENGTH_MAX: Final = 16_000
"""Maximum characters of an error or a reason."""

# The bounds are enforced when events are decoded: user code may have taken over their sender.
_Tag = Annotated[ReplicaTag, msgspec.Meta(max_length=200)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Event(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    replica_tag: _Tag


class Placed(_Event, frozen=True):
    """Its process is running."""

    pid: Annotated[int, msgspec.Meta(ge=0, le=2**22)]
    was_spare: bool = False
    """The process was a spare, and ready."""
    process: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9-]{0,100}\Z")] = ""
    """Its name in the names of its metrics files; empty for its pid."""
    address: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9.:%_-]{0,100}\Z")] = ""
    """Address of its machine; empty for the host's."""


class Waits(_Event, frozen=True):
    """It has no process yet; ``reason`` is a message for users."""

    reason: _Text
    is_process_starting: bool = False
    """Its process is starting; otherwise it waits for resources, which does not block other starts."""


class Constructed(_Event, frozen=True):
    """It is serving, with the configuration of that version."""

    config_version: _Version


class ReplicaStartFailed(_Event, frozen=True):
    """Import or constructor raised; its process may still exist."""

    error: _Text
    is_unusable: bool = False
    """True when no other start of this code can succeed."""


class Reconfigured(_Event, frozen=True):
    """``reconfigure`` has ended; ``error`` is None when it was applied."""

    config_version: _Version
    error: _Text | None


class HealthCheckSent(_Event, frozen=True):
    """The health check was sent: its timeout starts."""


class HealthChecked(_Event, frozen=True):
    """A health check has returned; ``error`` is None when it passed."""

    error: _Text | None


class Drained(_Event, frozen=True):
    """Nothing is in flight, and no new request can arrive."""


class ProcessEnded(_Event, frozen=True):
    """Its process has ended, or will never start; ``error`` describes how."""

    error: _Text


class Evaluated(_Event, frozen=True):
    """An evaluation has ended; ``body`` is passed on to the controller as it is. Changes no state."""

    request_id: Annotated[str, msgspec.Meta(max_length=64)]
    body: Annotated[bytes, msgspec.Meta(max_length=RESULT_BYTES_MAX)]


ReplicaEvent = (
    Placed
    | Waits
    | Constructed
    | ReplicaStartFailed
    | Reconfigured
    | HealthCheckSent
    | HealthChecked
    | Evaluated
    | Drained
    | ProcessEnded
)


def apply_event(state: HostState, event: ReplicaEvent, now: float) -> HostState:
    """The state after ``event``. Events of unknown replicas change nothing."""
    replica = state.replicas.get(event.replica_tag)
    if replica is None:
        return state
    changed = _apply(replica, event, now)
    return forget_replica(state, replica.tag) if changed is None else put_replica(state, changed)


def _apply(replica: HostedReplica, event: ReplicaEvent, now: float) -> HostedReplica | None:
    match event:
        case Placed(pid=pid):
            new_error = "" if is_starting(replica) else replica.error
            return msgspec.structs.replace(replica, pid=pid, is_process_starting=False, error=new_error)
        case Waits(reason=reason, is_process_starting=is_process_starting):
            return _on_waiting(replica, reason, is_process_starting=is_process_starting)
        case Constructed(config_version=version):
            if not is_starting(replica):
                return replica
            return msgspec.structs.replace(
                replica,
                status=ReplicaStatus.RUNNING,
                is_process_starting=False,
                config_version=version,
                requested_config_version=max(version, replica.requested_config_version),
                error="",
                check_at=now + replica.goal.health_check_period_s,
            )
        case ReplicaStartFailed(error=error, is_unusable=is_unusable):
            return msgspec.structs.replace(fail(replica, error), is_unusable=is_unusable)
        case Reconfigured(config_version=version, error=error):
            return _on_reconfigured(replica, version, error)
        case HealthCheckSent():
            deadline = now + replica.goal.health_check_timeout_s
            return (
                msgspec.structs.replace(replica, check_at=deadline) if replica.is_check_pending else replica
            )
        case HealthChecked(error=error):
            return _on_health_checked(replica, error, now)
        case Evaluated():
            return replica
        case Drained():
            return msgspec.structs.replace(replica, is_drained=True)
        case ProcessEnded(error=error):
            return _on_process_ended(replica, error)


def is_starting(replica: HostedReplica) -> bool:
    """True until it was constructed, has failed, or was omitted."""
    return replica.status is ReplicaStatus.STARTING


def fail(replica: HostedReplica, error: str) -> HostedReplica:
    """``replica`` after a failed start; unchanged when it is not starting."""
    if not is_starting(replica):
        return replica
    return msgspec.structs.replace(replica, status=ReplicaStatus.FAILED, error=trim_error(error))


def count_failed_check(replica: HostedReplica, error: str) -> HostedReplica:
    """``replica`` after one more health check failed or timed out."""
    failed = replica.checks_failed + 1
    status = replica.status
    if failed >= replica.goal.health_check_failure_threshold:
        next_status = after(replica.status, ReplicaEventKind.CHECKS_FAILED)
        assert not isinstance(next_status, Gone), "a health check never removes a replica"
        status = next_status
    new_error = trim_error(error) if status is ReplicaStatus.UNHEALTHY else replica.error
    return msgspec.structs.replace(replica, status=status, checks_failed=failed, error=new_error)


def _on_waiting(replica: HostedReplica, reason: str, *, is_process_starting: bool) -> HostedReplica:
    if not is_starting(replica):
        return replica
    return msgspec.structs.replace(replica, is_process_starting=is_process_starting, error=reason)


def _on_reconfigured(replica: HostedReplica, version: int, error: str | None) -> HostedReplica:
    replica = msgspec.structs.replace(replica, is_reconfiguring=False, reconfigure_by=None)
    if error is not None:
        return msgspec.structs.replace(replica, config_error_version=version, error=trim_error(error))
    return msgspec.structs.replace(
        replica,
        config_version=max(version, replica.config_version),
        config_error_version=0,
        error="" if replica.config_error_version else replica.error,
    )


def _on_health_checked(replica: HostedReplica, error: str | None, now: float) -> HostedReplica:
    replica = msgspec.structs.replace(
        replica, is_check_pending=False, check_at=now + replica.goal.health_check_period_s
    )
    if error is not None:
        return count_failed_check(replica, error)
    next_status = after(replica.status, ReplicaEventKind.CHECK_PASSED)
    assert not isinstance(next_status, Gone), "a health check never removes a replica"
    new_error = "" if replica.status is ReplicaStatus.UNHEALTHY else replica.error
    return msgspec.structs.replace(replica, status=next_status, checks_failed=0, error=new_error)


def _on_process_ended(replica: HostedReplica, error: str) -> HostedReplica | None:
    next_status = after(replica.status, ReplicaEventKind.PROCESS_ENDED)
    if isinstance(next_status, Gone):
        return None
    if next_status is replica.status:  # FAILED or DEAD already: keep the first error
        return msgspec.structs.replace(replica, has_process=False, is_process_starting=False)
    return msgspec.structs.replace(
        replica, status=next_status, error=trim_error(error), has_process=False, is_process_starting=False
    )
