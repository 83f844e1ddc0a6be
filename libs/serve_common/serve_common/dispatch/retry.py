"""When a request may be sent a second time.

Why so strict: a model call can have effects. What was refused or never arrived may go elsewhere; what may have begun,
only when running it twice is allowed by HTTP (idempotent methods) or by the client (`Idempotency-Key`).
"""

from __future__ import annotations

from typing import Final

LOSSES_MAX: Final = 10
"""A request that was lost so often, for whatever reason, is given up."""
DEATHS_MAX: Final = 2
"""A request that has met so many dying replicas is likely the cause of it."""

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})


def can_repeat(method: str, *, has_idempotency_key: bool) -> bool:
    """True when running the request twice does no harm."""
    return has_idempotency_key or method in _IDEMPOTENT


def may_send_again(*, is_repeatable: bool, has_answer_begun: bool, losses: int) -> bool:
    """Whether a request whose replica died or lost it may be sent again; ``losses`` counts this one too."""
    return is_repeatable and not has_answer_begun and losses < LOSSES_MAX
