"""LRU cache of models: which are held, and which is evicted for another one; without I/O.

Why a module of its own: its invariants, never more models than allowed and eviction of the least recently used idle
one, are proved on this file alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar, final

UNLIMITED: Final = -1

M = TypeVar("M")


@final
class ModelCache(Generic[M]):
    """At most ``slots_max`` models by their id, the least recently used first."""

    def __init__(self, slots_max: int) -> None:
        self._slots_max = slots_max
        self._models: OrderedDict[str, M] = OrderedDict()

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    @property
    def has_free_slot(self) -> bool:
        """True when another model may be added."""
        return self._slots_max == UNLIMITED or len(self._models) < self._slots_max

    def use(self, model_id: str) -> M | None:
        """Return the model and mark it as most recently used; None when it is not held."""
        model = self._models.get(model_id)
        if model is not None:
            self._models.move_to_end(model_id)
        return model

    def put(self, model_id: str, model: M) -> None:
        """Add a model; the cache must have room."""
        assert self.has_free_slot
        assert model_id not in self._models
        self._models[model_id] = model

    def remove(self, model_id: str) -> M | None:
        """Remove and return the model; None when it is not held."""
        return self._models.pop(model_id, None)

    def choose_victim(self, may_go: Callable[[M], bool]) -> str | None:
        """The id of the least recently used model that ``may_go`` accepts; None when there is none."""
        return next((model_id for model_id, model in self._models.items() if may_go(model)), None)
