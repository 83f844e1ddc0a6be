"""Model multiplexing: many models in one replica, loaded on demand and evicted when others need the place.

Why in the replica: only there it is known which models fit beside each other. Replicas publish which models they hold,
and routers prefer those replicas; routers decide nothing else.

`model_cache` decides which model is evicted, `models` loads and closes models on the event loop and has the decorator
that users import.
"""

from __future__ import annotations

from muster.multiplexing.models import multiplexed

__all__ = ["multiplexed"]
