"""What a batched call can fail with, besides what the batch function itself raises.

Why their own types: a caller can tell a function that broke the rules of batching from one that failed at its work.
"""

from __future__ import annotations


class WrongBatchResult(RuntimeError):
    """The batch function returned or yielded something that cannot be dealt out to its callers."""


class BatchCancelled(RuntimeError):
    """The batch function was cancelled, though callers were waiting: its event loop is being closed."""
