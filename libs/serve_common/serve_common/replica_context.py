"""Which replica this process is, for what users import; None in any other process.

Why a plain module variable: a replica is a process, and this is set once, before the user's code is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from serve_common.names import BackendTag, ReplicaTag
from serve_common.settings import BusSettings


class ReplicaContext(msgspec.Struct, kw_only=True):
    """A running replica as its own code sees it."""

    replica_tag: ReplicaTag
    backend_tag: BackendTag
    bus: BusSettings
    """With the credentials of role ``replica``: handles connect with these."""
    code_version: int
    companions: dict[BackendTag, int]
    """See `ReplicaGoal.companions`; a reconfigure may renew it."""
    servable_object: object = None
    """The user's constructed object; None until the constructor has returned."""
    publish_models: Callable[[Sequence[str]], None] | None = None
    """Tells routers which multiplexed models this replica holds now; callable from any thread."""


_current: ReplicaContext | None = None


def set_replica_context(context: ReplicaContext | None) -> None:
    """For the replica process, once at its start."""
    global _current  # noqa: PLW0603 - see the module's text
    _current = context


def current_replica() -> ReplicaContext | None:
    """None when this process is no replica."""
    return _current
