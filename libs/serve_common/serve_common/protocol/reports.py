"""Messages between controller, hosts and proxies: goals of hosts, reports of both, notices, wake-ups; and log lines.

Why whole values: the controller sends a host *all* that it should run, with a generation, and the host reports *all*
that it runs. A lost or duplicated message then costs time and never correctness.

Why log lines are plain JSON: any NATS client shows them, and a program reads them as a log file. A message holds one or
more lines, each ended by a newline.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from serve_common.config.backend import LoggingConfig, ReplicaConfig
from serve_common.names import BackendTag, GoalId, HostId, ProxyId, ReplicaTag
from serve_common.protocol.subjects import UNREADABLE, Address, Amount, Count, Label, Moment, Seconds, Text

REPLICAS_MAX = 50_000
"""Replicas of one host in a message; far more than fit into a NATS message."""
MISSING_CODE_MAX = 100
"""Digests of missing code in one report; the others follow."""
_RESOURCES_MAX = 1_000
_BUCKETS_MAX = 256
EXAMPLES_MAX = 5
JUDGED_MAX = 1_000
"""Backends whose request_counts are in one report."""


ENCODING: Final = "encoding"
"""Field of a log line of a replica whose `LoggingConfig` wants JSON: readers show the line as it is."""


class ReplicaStatus(Enum):
    """Status of one replica, as its host reports it."""

    STARTING = "starting"
    """The actor was requested; import or constructor not finished."""
    RUNNING = "running"
    """Serves requests."""
    UNHEALTHY = "unhealthy"
    """Runs, but its health check failed as often as the threshold."""
    DRAINING = "draining"
    """Takes nothing new, finishes what is in flight."""
    FAILED = "failed"
    """Import or constructor raised, or took too long; the process is gone. Reported until the goal omits it."""
    DEAD = "dead"
    """It was running and its process ended unexpectedly. Reported until the goal omits it."""


class ReplicaRank(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one replica among those of its backend, each from 0 and without gaps once all wanted ones run."""

    rank: Count
    """Number among all replicas."""
    node_rank: Count
    """Number of its host among those that run replicas of the backend."""
    local_rank: Count
    """Number among the replicas on its host."""


class ReplicaGoal(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that a host should run."""

    replica_tag: Annotated[ReplicaTag, Meta(max_length=256)]
    backend_tag: Annotated[BackendTag, Meta(max_length=256)]
    replica_config: ReplicaConfig
    config_version: Count
    """Rises with every change of the fields below; the host reconfigures in place when it does."""
    user_config: Any = None
    logging_config: LoggingConfig | None = None
    """As in `BackendConfig`."""
    max_concurrent_queries: Count
    graceful_shutdown_timeout_s: Seconds
    health_check_period_s: Seconds
    health_check_timeout_s: Seconds
    start_timeout_s: Seconds
    health_check_failure_threshold: Count = 3
    may_call: tuple[Annotated[str, Meta(max_length=256)], ...] | None = None
    """As in `BackendConfig`."""
    code_version: Count = 0
    """The backend's code version."""
    peer_versions: dict[BackendTag, Count] = {}
    """Code versions of the same application's other backends when this replica was decided: its requests prefer
    replicas of these, so that a chain keeps to one version of the application during an update."""
    rank: ReplicaRank | None = None
    """None from a controller that gave none. The host passes on a new one without a new configuration."""
    world_size: Count = 0
    """Number of replicas wanted of the backend; 0 from such a controller."""


class HostGoal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one host should run; what is not in it is drained and stopped."""

    host_id: Annotated[HostId, Meta(max_length=256)]
    epoch: Count
    generation: Count
    """Rises with every change of this host's goal. A lower (epoch, generation) is refused by the host."""
    replicas: Annotated[list[ReplicaGoal], Meta(max_length=REPLICAS_MAX)]
    kill: Annotated[list[ReplicaTag], Meta(max_length=REPLICAS_MAX)] = []
    """Replicas not in ``replicas`` that must be killed without draining."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of one replica, as its host reports it."""

    replica_tag: Annotated[ReplicaTag, Meta(max_length=256)]
    status: ReplicaStatus
    config_version: Count = 0
    """The newest configuration that was applied; 0 before the first."""
    config_error_version: Count = 0
    """The configuration for which ``reconfigure`` raised; 0 for none."""
    error: Text = ""
    """The user's traceback, or why the process ended; at most the last `ERROR_LENGTH_MAX` characters."""
    is_unusable: bool = False
    """The start failed and would wherever it is tried: the code cannot be served as it is."""
    pid: Count = 0


ERROR_LENGTH_MAX = 8_000


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole inventory of one host, sent about every second and at once on change."""

    host_id: Annotated[HostId, Meta(max_length=256)]
    incarnation: Label
    """Random for each run of the host process; nothing of an old run survives into a new one. It owns the host's id
    while it lives, so it is a secret of host and controller: never in a log line, a metric or what others may read."""
    sequence: Count
    """Rises within an incarnation; a report with a lower one came late and is dropped."""
    started_at: Moment
    """When this incarnation began, seconds since 1970 by the host's clock; of two, one that began later takes over."""
    epoch: Count
    generation: Count
    """Epoch and generation of the goal that is applied; both 0 before the first."""
    leader_epoch: Count = 0
    """The highest epoch that the host has received: it refuses goals of lower ones. 0 before the first."""
    resources: Annotated[dict[Label, Amount], Meta(max_length=_RESOURCES_MAX)]
    """Total resources by Ray's names: CPU, GPU, memory (bytes) and custom ones."""
    replicas: Annotated[list[ReplicaReport], Meta(max_length=REPLICAS_MAX)]
    metrics_url: Address = ""
    """As in `ProxyReport`, for its own and its replicas' metrics."""
    leaving: bool = False
    """The host is stopping and drains everything by itself."""
    missing_code: Annotated[list[Label], Meta(max_length=MISSING_CODE_MAX)] = []
    """Digests of code that it waits for and that the bucket of code lacks."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of the requests of one backend so far, as one router counted them."""

    rollout_id: Annotated[GoalId, Meta(max_length=64)] = GoalId("")
    """Goal of the rollout that they were counted for: the next one's canary and baseline have the same tags."""
    successes: Count = 0
    """Responses with a status below 400."""
    client_errors: Count = 0
    """Responses with a status of 400 to 499."""
    errors: Count = 0
    """Responses with a status of 500 and above, and requests that got none."""
    times: Annotated[dict[Count, Count], Meta(max_length=_BUCKETS_MAX)] = {}
    """Number of requests by the time until the end of their response, or until their client left, in the buckets of
    `routing.request_counts`; without failed ones and WebSockets."""
    compared: Count = 0
    """Responses to copies that were compared with what the caller got."""
    different: Count = 0
    """Those of them that differ beyond what is known to vary."""


class ProxyReport(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy's state, sent about every second and at once on change.

    Why the controller needs it: a goal that changes routing succeeds only when every live proxy has applied the
    snapshot.
    """

    proxy_id: Annotated[ProxyId, Meta(max_length=256)]
    incarnation: Label
    """As in `HostReport`."""
    sequence: Count
    """Rises within a run of the process."""
    started_at: Moment
    """When this run began, seconds since 1970."""
    applied_snapshot_id: Count
    """Every snapshot up to this id is applied; 0 before the bucket was read."""
    address: Address = ""
    """Address it listens on, as host:port; with ``https://`` before it where it ends TLS."""
    http_error: Text = ""
    """Why the newest `HttpSnapshot` is not applied (a middleware cannot be imported); empty when it is."""
    http_error_snapshot_id: Count = 0
    """Id of that snapshot; 0 for none."""
    metrics_url: Address = ""
    """Where the controller scrapes it when there is no Prometheus, such as ``http://10.0.0.7:9102/metrics``; proxies
    that share a port report the same. Empty: it cannot be scraped."""
    leaving: bool = False
    """True when it drains and takes no new requests; goals no longer wait for it."""
    request_counts: Annotated[dict[BackendTag, RequestCounts], Meta(max_length=JUDGED_MAX)] = {}
    """Counts of the backends whose snapshots name a rollout, since this process knows that."""
    differences: Annotated[
        dict[BackendTag, Annotated[list[Label], Meta(max_length=EXAMPLES_MAX)]], Meta(max_length=JUDGED_MAX)
    ] = {}
    """By canary, for people: where its responses differ, such as ``$.label: 3 instead of 8``."""


class LeaderNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Published by a controller that becomes the leader."""

    controller_id: Label
    epoch: Count


AGAIN_S: Final = 1.0
"""Seconds after which a `Wake` is repeated while requests wait: a lost one costs no more than that."""


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that requests wait for a backend without replicas.

    Why a message of its own: the load from scrapes is seconds old, and the first request should not wait for it.
    """

    backend_tag: Label
    waiting: Count
    """Number of requests that wait at this router."""


KINDS: Final = ("controller", "proxy", "host", "replica")
"""Kinds of processes, as in the subjects."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
REPLAY_LINES_MAX: Final = 200


def level_number(name: str) -> int:
    """The severity of a level; an unknown level counts as ``info``."""
    return LEVELS.index(name) if name in LEVELS else LEVELS.index("info")


def read_line(data: bytes) -> dict[str, Any]:
    """Parse a log line; one that is no JSON object becomes a message."""
    try:
        line = msgspec.json.decode(data)
    except UNREADABLE:
        line = None
    if isinstance(line, dict):
        return line
    return {"event": "print", "message": data.decode(errors="replace").rstrip("\n")}


def get_kind(line: Mapping[str, Any], publisher_kind: str) -> str:
    """The kind of process that logged ``line``: hosts also publish the lines of their replicas."""
    return "replica" if line.get("service") == "replica" else publisher_kind


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects lines; an empty field matches all."""

    kinds: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()
    """A subset of `KINDS`."""
    backend_tag: Label = ""
    host_id: Label = ""
    level: Label = ""
    """Lowest level to include."""
    request_id: Label = ""

    def matches(self, kind: str, line: Mapping[str, Any]) -> bool:
        """Whether ``line``, of a process of ``kind``, is selected."""
        return (
            (not self.kinds or kind in self.kinds)
            and (not self.backend_tag or line.get("backend_tag") == self.backend_tag)
            and (not self.host_id or line.get("host_id") == self.host_id)
            and (not self.request_id or line.get("request_id") == self.request_id)
            and (not self.level or level_number(str(line.get("level"))) >= level_number(self.level))
        )


class ReplayRecentLogs(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the newest lines that each process still has in memory.

    They publish them on the subject of `Subjects.recalled_log`; a process without matching lines sends nothing.
    """

    token: Label
    """Chosen by the requester; one token of a subject."""
    limit: Count = REPLAY_LINES_MAX
    filter: LogFilter = LogFilter()
