"""What the controller needs from outside."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from serve_common.api.views import EventView, HistoryView
from serve_common.config.autoscaling import AutoscalingContext, AutoscalingPolicy
from serve_common.config.external_gates import ExternalGate
from serve_common.errors import ServeError
from serve_common.names import BackendTag, ControllerId, EndpointTag, HostId, ReplicaTag
from serve_common.protocol.captures import CapturedPair
from serve_common.protocol.evaluation import Evaluation, EvaluationResult
from serve_common.protocol.gates import GateRequest, GateResponse
from serve_common.protocol.reports import HostGoal, LeaderNotice
from serve_common.protocol.snapshots import Snapshot
from serve_controller.core.autoscaling.values import LoadRequest, LoadSample, Targets
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges


class PolicyFailed(ServeError):
    """A user's policy function raised, took too long, or gave no number."""


class GateSilent(ServeError):
    """An external gate of a rollout gave no answer; the message says why."""


class ReplicaSilent(PolicyFailed):
    """A replica did not evaluate in time; another one may."""


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's policy function returned."""

    num_replicas: float
    policy_state: dict[str, Any] | None = None
    """None leaves the state unchanged."""


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the audit log: which change was made, by which client."""

    at: float
    """Seconds since 1970."""
    principal: str = ""
    """Name that the client gave for itself, unverified; empty for none."""
    verb: str
    subject: str
    """Name of the changed object, such as a backend tag."""
    goal_id: str | None
    request: str
    """The command as JSON."""
    old: str | None = None
    """The changed object before, as JSON; None if it did not exist."""
    new: str | None = None
    """The changed object after, as JSON; None if it was removed."""


class Store(Protocol):
    """The checkpoint's database. Every method raises `StoreUnavailable` when it does not answer in time."""

    async def migrate(self) -> None:
        """Migrate the schema to this version. Idempotent, and safe to call from several controllers at once."""
        ...

    async def acquire_leadership(
        self, controller_id: ControllerId, ttl_s: float, above: int = 0
    ) -> int | None:
        """Become the leader for ``ttl_s`` seconds if the lease is free, over, or this controller's own.

        Returns the new epoch, or None while another one leads. It is higher than any before, than ``above``, and, also
        where the store was restored, than all that this controller had. Judged by the database's clock.
        """
        ...

    async def renew_leadership(self, controller_id: ControllerId, epoch: int, ttl_s: float) -> None:
        """Keep the lease. Raises `FencedOut` when another epoch has begun or the store lacks what was recorded."""
        ...

    async def release_leadership(self, controller_id: ControllerId, epoch: int) -> None:
        """Release the lease, so that the next controller leads at once; no error if it was already lost."""
        ...

    async def load(self) -> Checkpoint:
        """Load the whole checkpoint. Raises `CheckpointUnreadable` when a row cannot be decoded."""
        ...

    async def record(self, epoch: int, changes: ObjectChanges, history: Sequence[HistoryEntry] = ()) -> None:
        """Write ``changes`` in one transaction that is refused unless ``epoch`` still leads, and is this controller's.

        Refused also where the store is not as the leader's last write left it: it was restored to an earlier state.
        Raises `FencedOut` (nothing was written) or `StoreUnavailable` (it may or may not have been written).
        """
        ...

    async def read_history(self, limit: int, subject: str | None, before: int | None) -> list[HistoryView]:
        """A page of the audit log, the newest first: at most ``limit`` entries, 1 or more.

        Filtered by ``subject`` and by ids lower than ``before``, unless they are None. A page is cut to fit into one
        NATS message, so only an empty page means that there is no more.
        """
        ...


class CodeRows(Protocol):
    """Uploaded code in the database. Every method raises `StoreUnavailable` when it does not answer in time.

    None is fenced: code is named by its content, so a controller that leads no more can only write what is true.
    """

    async def touch_code(self, digests: Collection[str]) -> set[str]:
        """Those of ``digests`` that are complete; they count as used now."""
        ...

    async def add_code_page(self, digest: str, page: int, data: bytes) -> None:
        """Write one page of code that is not complete yet."""
        ...

    async def complete_code(self, digest: str, pages: int) -> None:
        """Declare code with so many pages complete: all were written and verified."""
        ...

    async def code_pages(self, digest: str) -> int:
        """The number of pages of complete code; 0 when there is none."""
        ...

    async def read_code_page(self, digest: str, page: int) -> bytes | None:
        """One page; None when it is not there."""
        ...

    async def trim_code(self, named: Collection[str], unused_s: float) -> list[str]:
        """Delete code that is not among ``named`` and was not used for ``unused_s`` seconds; returns its digests."""
        ...


class CodeBucket(Protocol):
    """The bucket from which hosts fetch code. Every method raises `BusUnavailable`."""

    async def has_code(self, digest: str, pages: int) -> bool:
        """Whether all pages of the code are in the bucket."""
        ...

    async def put_code_page(self, digest: str, page: int, pages: int, data: bytes) -> None:
        """Put one page, of ``pages``; creates a missing bucket."""
        ...

    async def drop_code(self, digest: str) -> None:
        """Remove all pages."""
        ...


class CapturedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A captured request and its place in the stream."""

    sequence: int
    pair: CapturedPair | None
    """None for one that cannot be read."""


class CapturedRequests(Protocol):
    """The stream of captured requests, and a way to send them again. Every method raises `BusUnavailable`."""

    async def find(self, endpoint_tag: EndpointTag, sequence: int) -> CapturedRequest | None:
        """The first captured request of an endpoint at or after ``sequence``; None when there is none."""
        ...

    async def send(self, endpoint_tag: EndpointTag, pair: CapturedPair, timeout_s: float) -> None:
        """Send it to an endpoint as a caller would, and wait for whatever comes back."""
        ...


class LoadSource(Protocol):
    """Reads the loads of backends."""

    async def read(
        self, requests: Sequence[LoadRequest], targets: Targets, now: float
    ) -> Mapping[BackendTag, LoadSample]:
        """Read a sample for each of ``requests``; a missing one has the reason. Takes seconds at most; never raises."""
        ...


class PolicyRunner(Protocol):
    """Runs the users' policy functions, apart from the controller: one that hangs or crashes harms only its backend."""

    async def run(self, policy: AutoscalingPolicy, app_dir: str, context: AutoscalingContext) -> PolicyResult:
        """Call the function. Raises `PolicyFailed` with the user's traceback, also when it takes too long."""
        ...


class ReplicaEvaluator(Protocol):
    """Lets running replicas evaluate what only their processes may load."""

    async def evaluate(
        self, host_id: HostId, replica_tag: ReplicaTag, evaluation: Evaluation, timeout_s: float
    ) -> EvaluationResult:
        """What came of it in that replica. Raises `ReplicaSilent` when nothing came within ``timeout_s``, and other
        `PolicyFailed`."""
        ...


class GateSource(Protocol):
    """Asks the external gates of rollouts."""

    async def read(self, gate: ExternalGate, request: GateRequest) -> GateResponse:
        """The answer about a step. Raises `GateSilent` with the reason where there is none."""
        ...


class ControllerBus(Protocol):
    """Everything the controller does on NATS."""

    async def start_term(self, notice: LeaderNotice) -> None:
        """Serve the admin verbs, announce the leader to hosts and proxies, and report the bucket's whole content."""
        ...

    async def announce(self, notice: LeaderNotice) -> None:
        """Announce the leader to hosts and proxies, so that all report at once. May be lost; never raises."""
        ...

    async def round_trip(self, within_s: float) -> None:
        """Return once the bus has responded: everything sent to this process before that has been read.

        Raises `BusUnavailable` after ``within_s`` seconds without a response, or when not connected.
        """
        ...

    async def end_term(self) -> None:
        """Stop serving the admin verbs, so that callers reach the next leader."""
        ...

    async def send_goal(self, goal: HostGoal) -> None:
        """Send a whole goal; may be lost. Raises `BusUnavailable`, or `LimitReached` when it is too large."""
        ...

    async def publish(self, key: str, snapshot: Snapshot) -> int:
        """Put one key of the snapshot bucket; returns the revision that the bucket gave it.

        Raises `BusUnavailable`, or `LimitReached` when it is too large.
        """
        ...

    async def retract(self, key: str, revision: int) -> None:
        """Remove a key that the checkpoint does not have, if its revision in the bucket is still ``revision``.

        Raises `BusUnavailable`.
        """
        ...

    def publish_event(self, subject_kind: str, subject: str, payload: bytes) -> None:
        """Publish an event on ``serve.event.<subject_kind>.<subject>``, soon; returns at once and never raises.

        Events are for people: no component depends on them, and any may be lost.

        ``subject`` may be a tag or an id. ``payload`` is an `EventView` as JSON.
        """
        ...

    async def recent_events(self, limit: int) -> list[EventView]:
        """The newest retained events, the oldest first; empty when they cannot be read within 2 s."""
        ...
