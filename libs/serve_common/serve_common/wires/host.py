"""What the controller and a replica host say to each other.

Why whole values: the controller sends a host *all* that it should run, with a generation, and the host reports *all*
that it runs. A lost or doubled message then costs time and never correctness.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from serve_common.names import BackendTag, HostId, ReplicaTag
from serve_common.values.replica_config import ReplicaConfig


class ReplicaStatus(Enum):
    """What a host reports of one replica."""

    STARTING = "starting"
    """The actor was asked for; import or constructor not finished."""
    RUNNING = "running"
    """Serves requests."""
    UNHEALTHY = "unhealthy"
    """Runs, but its health check failed as often as is allowed."""
    DRAINING = "draining"
    """Takes nothing new, finishes what is in flight."""
    FAILED = "failed"
    """Import or constructor raised, or took too long; the process is gone. Kept until the goal leaves it out."""
    DEAD = "dead"
    """Had run and its process ended unasked. Kept until the goal leaves it out."""


class ReplicaGoal(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that a host should run."""

    replica_tag: ReplicaTag
    backend_tag: BackendTag
    replica_config: ReplicaConfig
    config_version: int
    """Rises with every change of the fields below; the host reconfigures in place when it does."""
    user_config: Any = None
    max_concurrent_queries: int
    graceful_shutdown_timeout_s: float
    health_check_period_s: float
    health_check_timeout_s: float
    start_timeout_s: float
    health_check_failure_threshold: int = 3
    code_version: int = 0
    """The version of the code, as the backend counts them."""
    companions: dict[BackendTag, int] = {}
    """Code versions of the same application's other backends when this replica was decided: its requests prefer
    replicas of these, so that a chain keeps to one version of the application during an update."""


class HostGoal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one host should run; what is not in it is drained and stopped."""

    host_id: HostId
    epoch: int
    generation: int
    """Rises with every change of this host's goal. A lower (epoch, generation) is refused by the host."""
    replicas: list[ReplicaGoal]
    kill: list[ReplicaTag] = []
    """Of those that are not in ``replicas``: to be ended without draining."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica as its host sees it."""

    replica_tag: ReplicaTag
    status: ReplicaStatus
    config_version: int = 0
    """The newest configuration that was applied; 0 before the first."""
    config_error_version: int = 0
    """The configuration that ``reconfigure`` raised at; 0 for none."""
    error: str = ""
    """The user's traceback, or why the process ended; at most `ERROR_LENGTH_MAX` characters, the end is kept."""
    pid: int = 0


ERROR_LENGTH_MAX = 8_000


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole inventory of one host, sent about every second and at once on change."""

    host_id: HostId
    incarnation: str
    """Differs in each life of the host process; in a new one nothing of the old life runs."""
    sequence: int
    """Rises within an incarnation; a report with a lower one came late and is dropped."""
    started_at: float
    """When this incarnation began, seconds since 1970 by the host's clock; tells which incarnation is newer."""
    epoch: int
    generation: int
    """Of the goal that this report already obeys; both 0 before the first."""
    resources: dict[str, float]
    """Whole resources by Ray's names: CPU, GPU, memory (bytes) and custom ones."""
    replicas: list[ReplicaReport]
    metrics_url: str = ""
    """As in `ProxyReport`: its own and its replicas' metrics."""
    leaving: bool = False
    """The host was asked to stop and drains everything by itself."""
