"""Batching in the replica: calls with one item each, processed by a function that takes a list of items.

Why here and not in a proxy: only the user's code knows which of its steps gains by processing many items at once, and
a batch must not depend on which router a call came through.

`queue` decides which calls make a batch, `batches` runs batches on the event loop, `calls` is one call from its
caller's side, `decorator` is what users import.
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
