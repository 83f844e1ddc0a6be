"""Which objects there are, and what one transaction changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from serve_common.names import BackendTag
from serve_controller.core.objects import (
    Application,
    Backend,
    CheckpointObject,
    Counters,
    Deployment,
    Endpoint,
    Goal,
    HostRecord,
    HttpRecord,
    ProxyRecord,
    Replica,
    Revision,
    SnapshotRecord,
)


class Kind(Enum):
    """What kinds of objects there are; the same word in SQL."""

    BACKEND = "backend"
    ENDPOINT = "endpoint"
    DEPLOYMENT = "deployment"
    APPLICATION = "application"
    REVISION = "revision"
    REPLICA = "replica"
    GOAL = "goal"
    HOST = "host"
    PROXY = "proxy"
    HTTP = "http"
    SNAPSHOT = "snapshot"
    COUNTERS = "counters"


Key = tuple[Kind, str]
"""Which object: its kind and its name within the kind."""

COUNTERS_KEY: Final[Key] = (Kind.COUNTERS, "counters")
HTTP_RECORD_KEY: Final[Key] = (Kind.HTTP, "options")

CLASSES: Final[Mapping[Kind, type[CheckpointObject]]] = {
    Kind.BACKEND: Backend,
    Kind.ENDPOINT: Endpoint,
    Kind.DEPLOYMENT: Deployment,
    Kind.APPLICATION: Application,
    Kind.REVISION: Revision,
    Kind.REPLICA: Replica,
    Kind.GOAL: Goal,
    Kind.HOST: HostRecord,
    Kind.PROXY: ProxyRecord,
    Kind.HTTP: HttpRecord,
    Kind.SNAPSHOT: SnapshotRecord,
    Kind.COUNTERS: Counters,
}


def revision_name(tag: BackendTag, revision: int) -> str:
    """The name of a revision among all."""
    return f"{tag}@{revision}"


def key_of(value: CheckpointObject) -> Key:  # noqa: C901 - a table
    """The key under which an object is kept."""
    match value:
        case Backend():
            return Kind.BACKEND, value.backend_tag
        case Endpoint():
            return Kind.ENDPOINT, value.endpoint_tag
        case Deployment():
            return Kind.DEPLOYMENT, value.tag
        case Application():
            return Kind.APPLICATION, value.name
        case Revision():
            return Kind.REVISION, revision_name(value.backend_tag, value.revision)
        case Replica():
            return Kind.REPLICA, value.replica_tag
        case Goal():
            return Kind.GOAL, value.goal_id
        case HostRecord():
            return Kind.HOST, value.host_id
        case ProxyRecord():
            return Kind.PROXY, value.proxy_id
        case HttpRecord():
            return HTTP_RECORD_KEY
        case SnapshotRecord():
            return Kind.SNAPSHOT, value.key
        case Counters():
            return COUNTERS_KEY


class Changes(msgspec.Struct, frozen=True):
    """What one transaction writes: objects as they are now, and keys of those that are gone."""

    puts: tuple[CheckpointObject, ...] = ()
    deletes: tuple[Key, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)
