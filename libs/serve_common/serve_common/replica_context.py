"""Which replica this process is, for what users import; None in any other process.

Why a plain module variable: a replica is a process, and this is set once, before the user's code is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from serve_common.bus.options import Login
from serve_common.names import BackendTag, ReplicaTag
from serve_common.settings import BusSettings


class HandleQueue(msgspec.Struct, frozen=True):
    """What waits in the calls that this process makes to one backend."""

    seconds: float
    """That calls have waited so far, those that still wait included; begins at 0 when handles are connected anew."""
    depth: int
    """Calls that wait now."""


class ReplicaContext(msgspec.Struct, kw_only=True):
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


_current: ReplicaContext | None = None


def set_replica_context(context: ReplicaContext | None) -> None:
    """For the replica process, once at its start."""
    global _current  # noqa: PLW0603 - see the module's text
    _current = context


def current_replica() -> ReplicaContext | None:
    """None when this process is no replica."""
    return _current
