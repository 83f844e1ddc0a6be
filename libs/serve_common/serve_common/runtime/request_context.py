"""Which replica this process is and which request its user code works on; what is cancelled when the caller leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Final, Protocol, final

import msgspec

from serve_common.names import BackendTag, ReplicaTag
from serve_common.nats.options import Login
from serve_common.runtime.settings import BusSettings
from serve_common.telemetry.spans import trace_id_of

LEFT_MAX: Final = 5_000
"""Callers that are remembered to have left: a thread may go on after the task of its request has ended."""


class Cancellable(Protocol):
    """Something that is under way."""

    def cancel(self) -> None:
        """Nobody wants it any more; may be called by any thread, and when it has ended."""


@final
class DisconnectPropagation:
    """Of all requests of this process, by `RequestContext.key`; callable from any thread."""

    def __init__(self) -> None:
        # Entered again when what is collected inside of it ends something.
        self._lock = threading.RLock()
        self._begun: dict[bytes, set[Cancellable]] = {}
        self._left: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Requests that something is under way for."""
        return len(self._begun)

    def watch(self, key: bytes, begun: Cancellable) -> None:
        """Until `forget`, cancel ``begun`` when that request's caller leaves; at once when it has left."""
        with self._lock:
            has_left = key in self._left
            if not has_left:
                self._begun.setdefault(key, set()).add(begun)
        if has_left:
            begun.cancel()

    def forget(self, key: bytes, begun: Cancellable) -> None:
        """``begun`` has ended."""
        with self._lock:
            others = self._begun.get(key)
            if others is not None:
                others.discard(begun)
                if not others:
                    del self._begun[key]

    def leave(self, key: bytes) -> None:
        """The caller of that request has left; what its threads begin later is cancelled too."""
        with self._lock:
            self._left[key] = None
            if len(self._left) > LEFT_MAX:
                del self._left[next(iter(self._left))]
            begun = self._begun.pop(key, ())
        for one in begun:
            one.cancel()


departures: Final = DisconnectPropagation()


class HandleQueue(msgspec.Struct, frozen=True):
    """What waits in the calls that this process makes to one backend."""

    seconds: float
    """That calls have waited so far, those that still wait included; begins at 0 when handles are connected anew."""
    depth: int
    """Calls that wait now."""


class CurrentReplica(msgspec.Struct, kw_only=True):
    """A running replica as its own code sees it."""

    replica_tag: ReplicaTag
    backend_tag: BackendTag
    bus: BusSettings
    """The replica's own: handles connect with these."""
    login: Login | None = None
    """As whom handles log in, now and from then on; None for a plain user."""
    may_call: tuple[str, ...] | None = None
    """As in `BackendConfig`; a reconfigure may renew it."""
    code_version: int
    companions: dict[BackendTag, int]
    """See `ReplicaGoal.companions`; a reconfigure may renew it."""
    servable_object: object = None
    """The user's constructed object; None until the constructor has returned."""
    publish_models: Callable[[Sequence[str]], None] | None = None
    """Tells routers which multiplexed models this replica holds now; callable from any thread."""
    handle_queues: Callable[[], Mapping[BackendTag, HandleQueue]] | None = None
    """Of every backend that a handle of this process has called; callable from any thread. Set by the first call."""


_current: CurrentReplica | None = None


def set_replica_context(context: CurrentReplica | None) -> None:
    """For the replica process, once at its start."""
    global _current  # noqa: PLW0603 - see the module's text
    _current = context


def current_replica() -> CurrentReplica | None:
    """None when this process is no replica."""
    return _current


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What belongs to one request on its way through all replicas that work on it."""

    request_id: str = ""
    traceparent: str = ""
    """Of the span that calls made for this request belong below; W3C's form."""
    tracestate: str = ""
    """W3C's, for requests that are traced; empty for all others."""
    endpoint_tag: str = ""
    route: str = ""
    deadline: float | None = None
    """By `time.monotonic` of this process; what is called for this request must be answered by then."""
    model_id: str = ""
    """The multiplexed model that the request is for; empty for none."""
    key: bytes = b""
    """Of this one request in this process, for `departures`; empty where nobody tells when its caller leaves."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, whether or not the request is sampled; empty when it belongs to no trace."""
        return trace_id_of(self.traceparent)


request_context: Final[ContextVar[RequestContext | None]] = ContextVar("muster_request", default=None)
"""None outside of requests."""
