"""The endpoint of a request, whether it is admitted and may be retried; and counts of requests. Pure."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import Final, final

from serve_common.config.backend import METHODS
from serve_common.dispatch.capture_rules import CaptureRule
from serve_common.dispatch.errors import MethodNotAllowed, NoRoute
from serve_common.errors import BadField, NotFound
from serve_common.names import DEFAULT_APPLICATION, BackendTag, EndpointTag, ReplicaTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_common.routing.route_table import RouteTable, TrafficSplit
from serve_common.telemetry.catalogue.specs import SECONDS_BUCKETS

BUCKETS_S: Final = SECONDS_BUCKETS
"""Upper bounds of the histogram of request seconds."""
OTHER_METHOD: Final = "other"
OTHER_STATUS: Final = 0
"""Counted in place of a response's status that is no HTTP status."""
CLIENT_GONE: Final = 499
"""Counted as the status of a request whose client disconnected."""

_METHODS: Final = frozenset(METHODS)


class ShadowOutcome(Enum):
    """Result of a shadow copy of a request."""

    RESPONDED = "answered"
    """The response had a status below 500."""
    ERROR = "error"
    """The backend responded with a failure."""
    FAILED = "failed"
    """There was no (complete) response in time."""
    SKIPPED = "skipped"
    """It was not sent, because of a limit or because its backend was scaled to zero."""


class RequestStats:
    """Counts of one endpoint's requests so far: plain numbers, read when metrics are scraped.

    Why not a metrics library's counters: they take a lock per label set and request. Why one per endpoint: it is
    dropped with its endpoint, so what was once deployed does not stay in the metrics for ever.
    """

    __slots__ = ("bucket_counts", "counts", "seconds_sum", "shadows")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], int] = {}
        """Requests by method and status."""
        self.bucket_counts = [0] * (len(BUCKETS_S) + 1)
        """Requests per bucket, not cumulative; the last is above all bounds."""
        self.seconds_sum = 0.0
        self.shadows: dict[tuple[BackendTag, ShadowOutcome], int] = {}
        """Shadow copies, by backend and outcome."""

    def add_shadow(self, backend_tag: BackendTag, outcome: ShadowOutcome) -> None:
        """Count one shadow copy that has ended."""
        key = (backend_tag, outcome)
        self.shadows[key] = self.shadows.get(key, 0) + 1

    def add(self, method: str, status: int, seconds: float) -> None:
        """Count one request that has ended."""
        try:
            self.counts[method, status] += 1
        except KeyError:
            key = (
                method if method in _METHODS else OTHER_METHOD,
                status if 100 <= status <= 999 else OTHER_STATUS,
            )
            self.counts[key] = self.counts.get(key, 0) + 1
        self.bucket_counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds_sum += seconds


@final
class NullRequestStats(RequestStats):
    """Counts nothing: for measuring what counting costs."""

    __slots__ = ()

    def add(self, method: str, status: int, seconds: float) -> None:
        """Do nothing."""


@final
class Endpoint:
    """One endpoint, prepared once per snapshot for the checks of every request."""

    __slots__ = (
        "allow",
        "backend_tags",
        "capture",
        "comparisons",
        "is_copied",
        "is_ingress",
        "methods",
        "options",
        "route",
        "shadows",
        "split",
        "stats",
        "tag",
    )

    def __init__(self, snapshot: EndpointSnapshot, stats: RequestStats) -> None:
        self.tag = snapshot.endpoint_tag
        self.route = snapshot.route or ""
        self.methods = frozenset(snapshot.methods)
        self.allow = ", ".join(snapshot.methods)
        self.split = TrafficSplit(snapshot.traffic)
        self.backend_tags: Final = frozenset(snapshot.traffic)
        """Its backends, those without weight included."""
        self.shadows: Final[tuple[tuple[BackendTag, float], ...]] = tuple(
            (tag, proportion) for tag, proportion in snapshot.shadows.items() if proportion > 0
        )
        self.comparisons: Final = {
            tag: comparison
            for comparison in snapshot.comparisons
            for tag in (comparison.canary, comparison.baseline)
        }
        """By shadow, how its responses are compared; those of others are only dropped."""
        self.capture: Final = None if snapshot.capture is None else CaptureRule(snapshot.capture)
        """Which requests are captured; None captures nothing."""
        self.is_copied: Final = bool(self.shadows) or self.capture is not None
        """Whether any of its requests may be copied, to shadows or into a capture: one check for both."""
        self.options = snapshot.options
        self.is_ingress = snapshot.is_ingress
        self.stats = stats

    def select_backend(self, value: bytes) -> BackendTag | None:
        """The backend that a request selects by the value of its `backend_header`; None without one.

        ``value`` is a tag, or a bare name of the default application. The backend may have weight 0. Raises `BadField`
        when this endpoint has no such backend: weights must not override an explicit choice.
        """
        if not value:
            return None
        name = value.decode("latin-1")
        for tag in (BackendTag(name), BackendTag(f"{DEFAULT_APPLICATION}/{name}")):
            if tag in self.backend_tags:
                return tag
        raise BadField(self.options.backend_header, f"{name[:130]!r} is no backend of endpoint {self.tag!r}")

    def takes(self, backend_tag: BackendTag, named: BackendTag | None) -> bool:
        """True when a request may be at ``backend_tag``: by weight, or because it is ``named``."""
        if named is not None:
            return named == backend_tag and named in self.backend_tags
        return backend_tag in self.split.backend_tags


def admit(table: RouteTable, endpoints: dict[EndpointTag, Endpoint], method: str, path: str) -> Endpoint:
    """The endpoint for a request. Raises `NoRoute` or `MethodNotAllowed`."""
    snapshot = table.match(path)
    if snapshot is None:
        raise NoRoute(path, table.error_format)
    endpoint = endpoints[snapshot.endpoint_tag]
    if method not in endpoint.methods:
        raise MethodNotAllowed(method, endpoint.allow)
    return endpoint


def admit_call(endpoints: dict[EndpointTag, Endpoint], tag: EndpointTag) -> Endpoint:
    """The endpoint for a plain call by name; methods and routes are HTTP's and do not matter. Raises `NotFound`."""
    endpoint = endpoints.get(tag)
    if endpoint is None:
        raise NotFound(f"there is no endpoint {tag[:130]!r}")
    return endpoint


CONFIRM_DEATH_S: Final = 3.0
"""Seconds without a subscriber after which a replica counts as dead: one whose connection was cut waits up to 2 s until
it connects again. A death is mostly known sooner, from the controller; new requests avoid the replica from the first.
"""
CERTAIN_DEATH_S: Final = 10.0
"""The same for requests that cannot be sent again, which would fail for nothing: on a machine that is full the login
takes seconds too, each of its steps up to 2."""
PROBE_SILENT_S: Final = 0.1
"""Seconds between probes of a suspected replica."""


@final
class FailureDetector:
    """Suspected replicas: those whose subject had no subscriber at the last publish.

    Why the first "no responders" confirms nothing: a replica that is reconnecting to the bus gives the same answer for
    a moment, and declaring it dead fails everything in flight there. So the silence must last, and begins anew when
    this process itself was disconnected, because then the replicas probably were too.
    """

    __slots__ = ("_probed_at", "suspects")

    def __init__(self) -> None:
        self.suspects: Final[dict[ReplicaTag, float]] = {}
        """Since when each is suspected."""
        self._probed_at: dict[ReplicaTag, float] = {}

    def reconnected(self) -> None:
        """Reset: this process was disconnected from the bus until now."""
        self.suspects.clear()
        self._probed_at.clear()

    def on_sign_of_life(self, replica: ReplicaTag) -> None:
        """A message came from ``replica``, which ends the suspicion."""
        self.suspects.pop(replica, None)
        self._probed_at.pop(replica, None)

    def no_responders(self, replica: ReplicaTag, now: float) -> float:
        """``replica``'s subject has no subscriber; returns for how many seconds that is known."""
        self._probed_at.setdefault(replica, now)
        return now - self.suspects.setdefault(replica, now)

    def due(self, now: float) -> list[ReplicaTag]:
        """The suspected replicas that are to be probed now."""
        due = [replica for replica, at in self._probed_at.items() if now - at >= PROBE_SILENT_S]
        for replica in due:
            self._probed_at[replica] = now
        return due


LOST_ATTEMPTS_MAX: Final = 10
"""A request that was lost so often, for any reason, is given up."""
DEATHS_MAX: Final = 2
"""A request whose replica died so often is likely the cause."""

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})


def can_repeat(method: str, *, has_idempotency_key: bool) -> bool:
    """True when running the request twice does no harm."""
    return has_idempotency_key or method in _IDEMPOTENT


def may_send_again(*, is_repeatable: bool, has_response_started: bool, lost_attempts: int) -> bool:
    """Whether a request whose replica died or lost it may be retried; ``lost_attempts`` includes this loss.

    Why so strict: a model call can have effects. A request that was refused or never arrived may go elsewhere; one that
    may have started, only if HTTP (idempotent methods) or the client (`Idempotency-Key`) allows running it twice.
    """
    return is_repeatable and not has_response_started and lost_attempts < LOST_ATTEMPTS_MAX
