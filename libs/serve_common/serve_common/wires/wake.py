"""What a router says when requests wait for a backend that was scaled to zero.

Why a message of its own: the load that scrapes show is seconds old, and the first request should not wait for it.
It is said again every `AGAIN_S` while they wait, so a lost one costs a second.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.wires.bounds import Count, Label

AGAIN_S: Final = 1.0


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """Requests wait for a backend without replicas."""

    backend_tag: Label
    waiting: Count
    """So many, at this router."""
