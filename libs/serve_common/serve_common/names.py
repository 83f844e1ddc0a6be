"""Names of things, and their syntax.

Why one module: names become NATS subject tokens, bucket keys, SQL keys, metric labels and Ray actor names, so what
is allowed is the narrowest of them all, checked once at the border. Everything behind the border carries the
``NewType`` and is not checked again.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from serve_common.errors import BadField

BackendTag = NewType("BackendTag", str)
"""Code and configuration with N replicas; of a deployment it reads ``app/deployment``."""
EndpointTag = NewType("EndpointTag", str)
"""A name that traffic is sent to; a deployment's endpoint has the tag of its backend."""
ReplicaTag = NewType("ReplicaTag", str)
"""``backend_tag#ordinal``; the ordinal comes from a durable counter and is never used again."""
HostId = NewType("HostId", str)
ProxyId = NewType("ProxyId", str)
ControllerId = NewType("ControllerId", str)
GoalId = NewType("GoalId", str)

DEFAULT_APPLICATION = "default"
"""The application of a deployment that was deployed by a bare name, as in Ray Serve."""

NAME_LENGTH_MAX = 63
"""Longest part of a name, in characters; with prefix and ordinal a subject stays far below NATS' advised 256."""
ROUTE_LENGTH_MAX = 512

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ROUTE = re.compile(r"/[A-Za-z0-9._~/-]*")


def check_name(value: str, field: str) -> str:
    """Return ``value`` when it is one valid name part; otherwise raise `BadField` naming ``field``."""
    if not value:
        raise BadField(field, "must not be empty")
    if len(value) > NAME_LENGTH_MAX:
        raise BadField(field, f"is {len(value)} characters long; at most {NAME_LENGTH_MAX} are allowed")
    if _PART.fullmatch(value) is None:
        raise BadField(
            field, f"{value!r} may have only letters, digits, '-' and '_', and starts with a letter or digit"
        )
    return value


def short_name(tag: str) -> str:
    """A deployment's name as its user typed it: without the application ``default``."""
    return tag.removeprefix("default/")


def deployment_tag(name: str, field: str = "name") -> BackendTag:
    """The tag of the deployment that a user calls ``name``: ``deployment`` or ``app/deployment``.

    Raises `BadField` when a part is not a valid name or there are more than two.
    """
    parts = name.split("/")
    if len(parts) > 2:
        raise BadField(field, f"{name[:100]!r} has more than one '/'; write deployment or app/deployment")
    for part in parts:
        check_name(part, field)
    return BackendTag("/".join(parts if len(parts) == 2 else (DEFAULT_APPLICATION, parts[0])))


def check_route(value: str, field: str) -> str:
    """Return the normal form of a route prefix (no slash at its end, except ``/`` itself).

    Raises `BadField` when it does not begin with '/', is too long, or has '//', '..' or characters that a path
    would have to escape.
    """
    if len(value) > ROUTE_LENGTH_MAX:
        raise BadField(field, f"is {len(value)} characters long; at most {ROUTE_LENGTH_MAX} are allowed")
    if _ROUTE.fullmatch(value) is None:
        raise BadField(field, f"{value!r} must begin with '/' and have only letters, digits and . _ ~ - /")
    if "//" in value or "/../" in f"{value}/" or "/./" in f"{value}/":
        raise BadField(field, f"{value!r} must not have an empty, '.' or '..' part")
    if f"{value}/".startswith("/-/"):
        raise BadField(field, f"{value!r} is reserved: '/-/' belongs to the proxy itself")
    return value.rstrip("/") or "/"


def replica_tag(backend_tag: BackendTag, ordinal: int) -> ReplicaTag:
    """The tag of the replica of ``backend_tag`` with that ordinal."""
    return ReplicaTag(f"{backend_tag}#{ordinal}")


def parse_backend_tag(tag: ReplicaTag) -> BackendTag:
    """The backend that a replica belongs to."""
    return BackendTag(tag.rpartition("#")[0])


def parse_ordinal(tag: ReplicaTag) -> int:
    """The ordinal in a replica's tag."""
    return int(tag.rpartition("#")[2])


class DeploymentID(NamedTuple):
    """A deployment's name and its application's."""

    name: str
    """Name of the deployment within its application."""
    app_name: str
    """The application; ``default`` unless the program named it."""

    def __str__(self) -> str:
        return f"Deployment(name={self.name!r}, app={self.app_name!r})"
