"""Which multiplexed models this replica holds, as its routers are told.

Why kept here and not asked for: user code says it when it changes, from any thread, and it is told again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import msgspec

MODELS_MAX: Final = 1_000
"""Told of one replica; routers choose by those, and the others are found by chance."""


@final
class HeldModels:
    """The ids of the models; reading and replacing them is one step, so any thread may."""

    __slots__ = ("_model_ids",)

    def __init__(self) -> None:
        self._model_ids: list[str] = []

    @property
    def has_any(self) -> bool:
        """True while at least one is held."""
        return bool(self._model_ids)

    def hold(self, model_ids: Sequence[str]) -> None:
        """These are held now, the most recently used last."""
        self._model_ids = list(model_ids)[-MODELS_MAX:]

    def encoded(self) -> bytes:
        """What is published: msgpack, a list of texts."""
        return msgspec.msgpack.encode(self._model_ids)
