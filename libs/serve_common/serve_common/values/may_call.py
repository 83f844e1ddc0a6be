"""Whom the handles in a deployment's replicas may call.

Why in the configuration: NATS enforces it, by what the token of each replica says, and what a replica may say must not
be its own code's choice. Handles look too, before they send, so that a call that would be dropped fails with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from serve_common.errors import BadField
from serve_common.names import check_name

EVERYTHING: Final = "*"
CALLS_MAX: Final = 100


def check_may_call(may_call: Sequence[str], field: str) -> None:
    """Each is an application, ``application/deployment``, or `EVERYTHING`; raises `BadField`."""
    if len(may_call) > CALLS_MAX:
        raise BadField(field, f"has {len(may_call)} entries; at most {CALLS_MAX} are allowed")
    for called in may_call:
        if called == EVERYTHING:
            continue
        parts = called.split("/")
        if len(parts) > 2:
            raise BadField(field, f"{called[:100]!r} must be an application, application/deployment, or '*'")
        for part in parts:
            check_name(part, field)


def allows(may_call: Sequence[str] | None, own_tag: str, called_tag: str) -> bool:
    """Whether a replica of the deployment ``own_tag`` may call ``called_tag``; None is its own application."""
    app = called_tag.partition("/")[0]
    if may_call is None:
        return app == own_tag.partition("/")[0]
    return any(called in (EVERYTHING, app, called_tag) for called in may_call)
