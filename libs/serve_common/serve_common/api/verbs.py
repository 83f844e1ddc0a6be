"""The admin API as one table: every verb with the class of its request, which has the type of the reply.

Why a table: the controller offers exactly these verbs, and the client and the CLI are tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from serve_common.api import commands, queries
from serve_common.api.commands import Command, Request
from serve_common.api.queries import Query

COMMANDS: Final[Mapping[str, type[Command[Any]]]] = {
    kind.verb: kind
    for kind in vars(commands).values()
    if isinstance(kind, type) and issubclass(kind, Command) and hasattr(kind, "verb")
}
"""Every verb that changes state."""

QUERIES: Final[Mapping[str, type[Query[Any]]]] = {
    kind.verb: kind
    for kind in vars(queries).values()
    if isinstance(kind, type) and issubclass(kind, Query) and hasattr(kind, "verb")
}
"""Every verb that changes nothing."""

VERBS: Final[Mapping[str, type[Request[Any]]]] = {**COMMANDS, **QUERIES}

PRINCIPAL_HEADER: Final = "Muster-Principal"
"""NATS header with the client's name for the audit log: an unverified claim."""
PRINCIPAL_LENGTH_MAX: Final = 200


def sanitize_principal(claimed: str) -> str:
    """``claimed`` as it is stored and shown: one line of printable characters, at most `PRINCIPAL_LENGTH_MAX`."""
    return " ".join("".join(c if c.isprintable() else " " for c in claimed).split())[:PRINCIPAL_LENGTH_MAX]


class ErrorView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an error reply; the headers ``Nats-Service-Error`` and ``…-Code`` summarize it."""

    code: str
    """Stable error code, such as ``not_found``."""
    message: str
    """Explanation for people."""
    field: str = ""
    """Path of the bad field, such as ``backend_config.num_replicas``."""
