"""How far an update may go beside, or below, the number of replicas that is wanted.

Why shares of it: what a backend can spare, and what its hosts can bear, grow with it.
"""

from __future__ import annotations

import math

from serve_common.values.backend_config import BackendConfig


def _share(num_replicas: int, percent: float) -> int:
    """So many percent of the replicas, rounded up: at least one unless it is 0 %, as Kubernetes rounds its surge."""
    return math.ceil(max(num_replicas, 1) * percent / 100.0)


def surge_of(config: BackendConfig) -> int:
    """How many replicas more than wanted may run during an update."""
    return _share(config.num_replicas, config.max_surge_percent)


def unavailable_of(config: BackendConfig) -> int:
    """How many replicas fewer than wanted may serve during an update where there is no room for more."""
    return _share(config.num_replicas, config.max_unavailable_percent)
