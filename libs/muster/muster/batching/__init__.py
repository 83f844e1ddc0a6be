"""Batching in the replica: calls with one item each, worked on by a function that takes many.

Why it is here and not in a proxy: only the user's code knows which of its steps gains by working on many items at
once, and a batch must never mix what different routers think of it.

`queue` decides, `batcher` carries out on the event loop, `running` is one batch at work, `decorator` is what users
import.
"""

from __future__ import annotations

from muster.batching.calls import BatchCancelled, WrongBatchResult
from muster.batching.decorator import (
    BatchDecorator,
    BatchedAny,
    BatchedFunction,
    BatchedMethod,
    BatchSettings,
    batch,
)

__all__ = [
    "BatchCancelled",
    "BatchDecorator",
    "BatchSettings",
    "BatchedAny",
    "BatchedFunction",
    "BatchedMethod",
    "WrongBatchResult",
    "batch",
]
