"""What services need from outside, where several of them need the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from serve_common.protocol.snapshots import Snapshot


class Clock(Protocol):
    """Where time is read, so that simulation can move it."""

    def now(self) -> float:
        """Seconds since 1970; never goes backwards within a process."""
        ...


class SnapshotListener(Protocol):
    """Receives the bucket's contents and changes from a watch, always in the order of the bucket."""

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """Changed keys (None: the key is gone from the bucket).

        ``whole`` means that this is everything the bucket holds, after a (re)opened watch. A known key that is missing
        from it only means that the bucket was lost; it will be refilled.
        """
        ...
