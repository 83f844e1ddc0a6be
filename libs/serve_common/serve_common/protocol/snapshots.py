"""The content of the key-value bucket: what routers need, one value per key.

Why so small: a subscriber takes only the keys it needs, and one change writes one key, however many others
exist. The bucket is a cache; Postgres holds the same values and refills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from serve_common.config.backend import (
    BackpressureConfig,
    CircuitBreaker,
    EndpointOptions,
    HttpOptions,
    OutlierEjection,
    ReplicaPolicyName,
)
from serve_common.config.capture import CaptureConfig
from serve_common.names import BackendTag, EndpointTag, GoalId, ReplicaTag
from serve_common.protocol.subjects import Amount, Count, Label

_REPLICAS_MAX = 100_000
_BACKENDS_MAX = 10_000
_IGNORED_PATHS_MAX = 1_000


class ShadowComparison(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Two shadows whose responses proxies compare with the caller's, in a shadow step of a rollout."""

    own: BackendTag
    """The deployment's own backend: only its responses to callers are compared with."""
    canary: BackendTag
    baseline: BackendTag
    tolerance: Amount = 1e-6
    """By how much numbers in JSON may differ, absolutely or relative to the larger one."""
    ignored_paths: Annotated[list[Label], Meta(max_length=_IGNORED_PATHS_MAX)] = []
    """What is not compared, as in `RolloutConfig`."""


class EndpointSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="endpoint", omit_defaults=True):
    """How requests reach an endpoint and where they go."""

    endpoint_tag: EndpointTag
    route: str | None
    """Path prefix without a slash at its end (except ``/``); None is headless."""
    methods: list[str]
    traffic: Annotated[dict[BackendTag, Amount], Meta(max_length=_BACKENDS_MAX)]
    """Weight of each backend; the sum is 1."""
    shadows: Annotated[dict[BackendTag, Amount], Meta(max_length=_BACKENDS_MAX)] = {}
    """Proportion of requests, 0 to 1, that is copied to each of these backends; their responses are dropped."""
    options: EndpointOptions = EndpointOptions()
    is_ingress: bool = False
    """Whether it is the ingress of its application; handles find one without a route by it."""
    capture: CaptureConfig | None = None
    """Which of its requests proxies capture; None captures nothing."""
    comparisons: Annotated[list[ShadowComparison], Meta(max_length=_BACKENDS_MAX)] = []
    """Shadows whose responses are compared before they are dropped."""


class BackendProtection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How routers choose among a backend's replicas and what they do when it fails; fields as in `BackendConfig`."""

    replica_policy: ReplicaPolicyName = ReplicaPolicyName.POWER_OF_TWO_CHOICES
    packing_num: Count = 3
    backpressure_config: BackpressureConfig = BackpressureConfig()
    outlier_ejection: OutlierEjection = OutlierEjection()
    retry_budget_percent: Amount = 20.0
    circuit_breaker: CircuitBreaker = CircuitBreaker()


class BackendSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="backend", omit_defaults=True):
    """Which replicas serve a backend, and its limits."""

    backend_tag: BackendTag
    replicas: Annotated[list[ReplicaTag], Meta(max_length=_REPLICAS_MAX)]
    """Replicas that may be sent new requests."""
    draining: Annotated[list[ReplicaTag], Meta(max_length=_REPLICAS_MAX)]
    """Replicas that finish what they have and take nothing new. A replica in neither list is dead or gone."""
    max_concurrent_queries: Count
    max_queued_requests: Annotated[int, Meta(ge=-1, le=2**53)]
    """As in `BackendConfig`: -1 for any number."""
    protection: BackendProtection = BackendProtection()
    can_wake: bool = False
    """It was scaled to zero: a router with waiting requests should send a `Wake`."""
    is_stopped: bool = False
    """It has no replicas and will get none before a user's change: requests are refused at once."""
    rollout_id: Annotated[GoalId, Meta(max_length=64)] = GoalId("")
    """Goal of the rollout that it takes part in: proxies report what becomes of its requests. Empty: in none."""
    code_versions: dict[ReplicaTag, Count] = {}
    """Code version of each replica while more than one runs; empty when all run the same one."""

    @property
    def is_judged(self) -> bool:
        """Whether it takes part in a rollout."""
        return bool(self.rollout_id)


class HttpSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="http", omit_defaults=True):
    """Options that proxies apply to every request; they may change while proxies run."""

    options: HttpOptions | None
    """None: the proxies' own defaults."""
    is_shut_down: bool = False
    """Everything was shut down and nothing deployed since: proxies that are set to do so close their port."""


SnapshotContent = EndpointSnapshot | BackendSnapshot | HttpSnapshot


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One key's value with its place in the order of all changes."""

    snapshot_id: Count
    """Durable, rises with every change of any key."""
    epoch: Count
    """Epoch of the leader that recorded it. A router refuses a value whose snapshot_id is lower than its own."""
    content: SnapshotContent | None
    """None: the endpoint or backend is gone. This stays in the bucket, so that a late value cannot revive it."""
    voids_below: int = 0
    """Snapshots with a lower snapshot_id are void, without tombstones: the store was restored to an earlier state, and
    what still exists was published again, before this. Set in the HTTP key."""


class SnapshotListener(Protocol):
    """Receives the bucket's contents and changes from a watch, always in the order of the bucket."""

    def on_snapshots(self, snapshots: Mapping[str, Snapshot | None], *, whole: bool) -> None:
        """Changed keys (None: the key is gone from the bucket).

        ``whole`` means that this is everything the bucket holds, after a (re)opened watch. A known key that is missing
        from it only means that the bucket was lost; it will be refilled.
        """
        ...
