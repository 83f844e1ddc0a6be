"""The context of running user code: its replica, and the request that it works on.

Why functions and no globals: the same code runs in a replica, in a test and in a shell, and must get a clear error
where there is no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final

import msgspec
from opentelemetry.context import get_current

from muster.sdk.absent import absent
from serve_common.errors import PermanentError
from serve_common.names import BackendTag, DeploymentID
from serve_common.protocol.reports import ReplicaGoal, ReplicaRank
from serve_common.runtime.request_context import RequestContext, current_replica, request_context

__all__ = [
    "NotInReplica",
    "ReplicaContext",
    "RequestContext",
    "get_batch_request_contexts",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_request_context",
    "get_trace_context",
]

batch_contexts: Final[ContextVar[Sequence[RequestContext | None]]] = ContextVar("muster_batch", default=())
"""Request contexts of the running batch; empty outside of batches."""

base_context: Final[Context] = copy_context()
"""Context variables as of the import of user code: the ids that all logs carry, and nothing of any request. Copied for
tasks that serve several requests."""


class NotInReplica(PermanentError, RuntimeError):
    """The function is only available in a replica's process."""

    error_code = "not_in_replica"


class ReplicaID(str):
    """A replica's tag with the names that Ray Serve gives its parts."""

    __slots__ = ()

    @property
    def deployment_id(self) -> DeploymentID:
        """The deployment that it belongs to."""
        app_name, _, deployment = self.rpartition("#")[0].rpartition("/")
        return DeploymentID(deployment, app_name)

    def to_full_id_str(self) -> str:
        """Application, deployment and number, between ``#``."""
        return f"{self.deployment_id.app_name}#{self.deployment_id.name}#{self.unique_id}"

    @property
    def unique_id(self) -> str:
        """Its number within the deployment; no other replica of the deployment ever has it."""
        return self.rpartition("#")[2]


class ReplicaDeploymentConfig(msgspec.Struct, frozen=True):
    """What a replica knows of its deployment's options, by Ray Serve's names; times are seconds."""

    num_replicas: int
    """Replicas wanted."""
    max_ongoing_requests: int
    """Requests that this replica works on at once."""
    user_config: Any
    """Value that ``reconfigure`` got last."""
    graceful_shutdown_timeout_s: float
    """Most seconds of a drain."""
    health_check_period_s: float
    """Seconds between health checks."""
    health_check_timeout_s: float
    """Seconds before a health check counts as failed."""


class ReplicaContext(msgspec.Struct, frozen=True, kw_only=True):
    """The replica that the code runs in."""

    app_name: str
    """Empty for a backend that belongs to no application."""
    deployment: str
    """Its name within the application; for a backend that belongs to none, its tag."""
    backend_tag: BackendTag
    """``app/name`` of its backend."""
    replica_tag: str
    """``backend_tag#ordinal``; in a program of Ray Serve's form ``replica_id.unique_id``, as there."""
    code_version: str
    """Number of code changes of its backend up to the code that it runs, as text."""
    servable_object: object
    """The constructed object of the user's class, or the function; None until the constructor has returned."""

    rank: ReplicaRank
    """Its number among the replicas of the deployment, of its host, and among those on its host, each from 0. Numbers
    change while replicas come and go; once all wanted ones run, there are no gaps."""
    world_size: int
    """Number of replicas that the deployment should have."""

    replica_id: ReplicaID
    """``backend_tag#ordinal``, with the names that Ray Serve gives its parts."""

    gang_context: None = None
    """There are no gangs."""

    _deployment_config: ReplicaDeploymentConfig | None = None
    """Ray Serve's name, which programs read; None outside of stacks."""


_FIRST_RANK: Final = ReplicaRank(rank=0, node_rank=0, local_rank=0)


def get_replica_context() -> ReplicaContext:
    """The replica that this code runs in. Raises `NotInReplica` in any other process."""
    replica = current_replica()
    if replica is None:
        raise NotInReplica(
            "`serve.get_replica_context()` may only be called from within a Ray Serve deployment."
        )
    app_name, _, deployment = replica.backend_tag.rpartition("/")
    replica_id = ReplicaID(replica.replica_tag)
    return ReplicaContext(
        app_name=app_name,
        deployment=deployment,
        backend_tag=replica.backend_tag,
        replica_tag=replica_id.unique_id if replica.is_program else replica.replica_tag,
        replica_id=replica_id,
        code_version=str(replica.code_version),
        servable_object=replica.servable_object,
        rank=replica.rank or _FIRST_RANK,
        world_size=max(1, replica.world_size),
        _deployment_config=None if replica.goal is None else _deployment_config(replica.goal),
    )


def _deployment_config(goal: ReplicaGoal) -> ReplicaDeploymentConfig:
    return ReplicaDeploymentConfig(
        max(1, goal.world_size),
        goal.max_concurrent_queries,
        goal.user_config,
        goal.graceful_shutdown_timeout_s,
        goal.health_check_period_s,
        goal.health_check_timeout_s,
    )


def get_request_context() -> RequestContext | None:
    """The request that this code works on: its id, trace, endpoint, model and deadline; None outside of requests.

    The deadline is by `time.monotonic`, so ``context.deadline - time.monotonic()`` seconds are left.
    """
    return request_context.get()


class ServeRequestContext(msgspec.Struct, frozen=True):
    """A request by Ray Serve's names for its parts."""

    route: str
    """Prefix of its route; empty for a call by handle."""
    request_id: str
    """Its id in all logs, and in the header ``X-Request-ID``."""
    app_name: str
    """The application that it came to."""
    multiplexed_model_id: str
    """The multiplexed model that it is for; empty for none."""


def _get_serve_request_context() -> ServeRequestContext:
    """As Ray Serve's, which its documentation has programs import; all fields are empty outside of requests."""
    context = request_context.get() or RequestContext()
    app_name = context.endpoint_tag.rpartition("/")[0]
    return ServeRequestContext(context.route, context.request_id, app_name, context.model_id)


def get_trace_context() -> dict[str, Any] | None:
    """The current OpenTelemetry context, for spans of your own; None where no request is traced."""
    return get_current() or None


def get_batch_request_contexts() -> list[RequestContext | None]:
    """In a batch function: the contexts of its items, in their order; None for an item that belongs to no request.

    Empty outside of batches.
    """
    return list(batch_contexts.get())


def get_multiplexed_model_id() -> str:
    """The model that the request is for, as its caller said (header ``serve_multiplexed_model_id``); empty for none."""
    context = request_context.get()
    return "" if context is None else context.model_id


if not TYPE_CHECKING:  # a checker would take it for any name

    def __getattr__(name: str) -> object:
        return absent("context", name)
