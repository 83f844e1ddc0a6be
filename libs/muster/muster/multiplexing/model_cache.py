"""Which models are held, and which of them goes when another one needs its place: decided without I/O.

Why apart: that there are never more than allowed, and that the one that goes is the least recently used of those that
nobody needs, is proved on this file alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar, final

UNLIMITED: Final = -1

M = TypeVar("M")


@final
class ModelCache(Generic[M]):
    """At most ``places`` models by their id, the least recently used first."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._models: OrderedDict[str, M] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    @property
    def has_room(self) -> bool:
        """True when another one may be put."""
        return self._places == UNLIMITED or len(self._models) < self._places

    def use(self, model_id: str) -> M | None:
        """That model, which is now the most recently used one."""
        model = self._models.get(model_id)
        if model is not None:
            self._models.move_to_end(model_id)
        return model

    def put(self, model_id: str, model: M) -> None:
        """Hold one more; there must be room."""
        assert self.has_room
        assert model_id not in self._models
        self._models[model_id] = model

    def remove(self, model_id: str) -> M | None:
        """Hold it no more."""
        return self._models.pop(model_id, None)

    def choose_who_goes(self, may_go: Callable[[M], bool]) -> str | None:
        """The least recently used of those that may go."""
        return next((model_id for model_id, model in self._models.items() if may_go(model)), None)
