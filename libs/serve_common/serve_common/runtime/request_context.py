"""The current replica and request of user code, and what is cancelled when a request's caller disconnects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Final, Protocol, final

import msgspec

from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.options import Login
from serve_common.protocol.reports import ReplicaGoal, ReplicaRank
from serve_common.runtime.settings import BusSettings
from serve_common.telemetry.trace_context import parse_trace_id

DISCONNECTED_MAX: Final = 5_000
"""Disconnected requests that are remembered: a thread may go on after the task of its request has ended."""


class Cancellable(Protocol):
    """An operation in progress."""

    def cancel(self) -> None:
        """Cancel it; may be called by any thread, and after it has ended."""


@final
class DisconnectPropagation:
    """Operations of this process' requests, by `RequestContext.key`; callable from any thread.

    Why in addition to cancelling tasks: a thread cannot be cancelled, but the operation it waits for can, and then it
    ends by itself. Which code started the thread does not matter: Muster, a framework, or the user's with a copy of its
    context.
    """

    def __init__(self) -> None:
        # Reentrant: garbage collection with the lock held may end an operation.
        self._lock = threading.RLock()
        self._operations: dict[bytes, set[Cancellable]] = {}
        self._disconnected: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Number of requests with operations in progress."""
        return len(self._operations)

    def watch(self, key: bytes, operation: Cancellable) -> None:
        """Until `forget`, cancel ``operation`` when that request's caller disconnects; at once when it already has."""
        with self._lock:
            is_disconnected = key in self._disconnected
            if not is_disconnected:
                self._operations.setdefault(key, set()).add(operation)
        if is_disconnected:
            operation.cancel()

    def forget(self, key: bytes, operation: Cancellable) -> None:
        """Remove ``operation``, which has ended."""
        with self._lock:
            others = self._operations.get(key)
            if others is not None:
                others.discard(operation)
                if not others:
                    del self._operations[key]

    def leave(self, key: bytes) -> None:
        """The caller of that request has disconnected; operations that its threads start later are cancelled too."""
        with self._lock:
            self._disconnected[key] = None
            if len(self._disconnected) > DISCONNECTED_MAX:
                del self._disconnected[next(iter(self._disconnected))]
            operations = self._operations.pop(key, ())
        for operation in operations:
            operation.cancel()


disconnect_propagation: Final = DisconnectPropagation()


class HandleQueue(msgspec.Struct, frozen=True):
    """Queueing of the calls that this process makes to one backend."""

    seconds: float
    """Seconds that calls have waited so far, those that still wait included; restarts at 0 when handles reconnect."""
    depth: int
    """Calls that are waiting."""


class CurrentReplica(msgspec.Struct, kw_only=True):
    """The running replica, for its own code."""

    replica_tag: ReplicaTag
    backend_tag: BackendTag
    bus: BusSettings
    """The replica's own settings, with which handles connect."""
    login: Login | None = None
    """Login of handles, renewed by itself; None for a plain user."""
    may_call: tuple[str, ...] | None = None
    """As in `BackendConfig`; a reconfigure may renew it."""
    code_version: int
    peer_versions: dict[BackendTag, int]
    """As in `ReplicaGoal`; a reconfigure may renew it."""
    is_program: bool = False
    """True when its code was uploaded by a program in Ray Serve's form, whose calls raise as in Ray Serve."""
    rank: ReplicaRank | None = None
    """As in `ReplicaGoal`, and `world_size` too; a reconfigure may renew both."""
    world_size: int = 0
    goal: ReplicaGoal | None = None
    """What the host was last told of it, with the configuration that it runs with; None in tests."""
    servable_object: object = None
    """The user's constructed object; None until the constructor has returned."""
    publish_models: Callable[[Sequence[str]], None] | None = None
    """Publishes to routers which multiplexed models this replica has loaded; callable from any thread."""
    handle_queues: Callable[[], Mapping[BackendTag, HandleQueue]] | None = None
    """Queues of every backend that a handle of this process has called; callable from any thread. Set by the first
    call."""


# A plain module variable: a replica is a process, and this is set once, before the user's code is imported.
_current: CurrentReplica | None = None


def set_replica_context(context: CurrentReplica | None) -> None:
    """Set the process' replica; called once at its start."""
    global _current  # noqa: PLW0603 - one for the process
    _current = context


def current_replica() -> CurrentReplica | None:
    """The replica that this process is, or None."""
    return _current


def is_program_replica() -> bool:
    """Whether this process is a replica whose code came with a program in Ray Serve's form."""
    return _current is not None and _current.is_program


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Context of one request, propagated through all replicas that work on it."""

    request_id: str = ""
    traceparent: str = ""
    """The parent span of calls made for this request; W3C's form."""
    tracestate: str = ""
    """W3C's tracestate of requests that are traced; empty for all others."""
    endpoint_tag: str = ""
    route: str = ""
    deadline: float | None = None
    """By `time.monotonic` of this process; calls made for this request must be answered by then."""
    model_id: str = ""
    """The multiplexed model that the request is for; empty for none."""
    key: bytes = b""
    """Identifies this request in `disconnect_propagation`; empty where a disconnect of its caller is not detected."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, whether or not the request is sampled; empty when it belongs to no trace."""
        return parse_trace_id(self.traceparent)


request_context: Final[ContextVar[RequestContext | None]] = ContextVar("muster_request", default=None)
"""None outside of requests.

The replica sets it, and handles, batches, models and logs read it, without either side knowing the other. Threads that
run plain functions get a copy.
"""
