"""Where handles find NATS: in a replica as the replica does, anywhere else as the command line does.

Why a role of its own outside: whoever may send pickles to replicas runs code there, which an admin's tools need not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from serve_common.identities.roles import Role, inbox_prefix
from serve_common.replica_context import current_replica
from serve_common.settings import BusSettings

_OWN_VARIABLES: Final = {
    "MUSTER_CLIENT_CREDS": "MUSTER_NATS_CREDS",
    "MUSTER_CLIENT_PASSWORD": "MUSTER_NATS_PASSWORD",
    "MUSTER_CLIENT_PASSWORD_FILE": "MUSTER_NATS_PASSWORD_FILE",
}
"""What credentials for handles are given by, and what the command line's search knows them as."""


def find_bus() -> BusSettings:
    """The bus of this process. Raises as `find_outside`."""
    replica = current_replica()
    return find_outside(os.environ, Path.cwd()) if replica is None else replica.bus


def find_outside(variables: Mapping[str, str], directory: Path, nats: str | None = None) -> BusSettings:
    """The stack that ``nats`` or MUSTER_NATS_URL names, or that is found from ``directory`` upwards.

    Credentials are the file MUSTER_CLIENT_CREDS, or those that lie with the stack. For a NATS with plain users the user
    is MUSTER_CLIENT_USER (``client``), the password MUSTER_CLIENT_PASSWORD or one that stands in the URL with that
    user. Raises `BusUnavailable` when no stack is found, `BadField`, and `SecretUnusable`.
    """
    # Only here: a replica needs none of it.
    from muster.cli.connection import StackChoice, find_stack  # noqa: PLC0415 - as above
    from muster.client.address import parse_urls  # noqa: PLC0415 - as above

    user = variables.get("MUSTER_CLIENT_USER") or Role.CLIENT.value
    own = {
        name: value
        for name, value in variables.items()
        if not name.startswith(
            ("MUSTER_NATS_CREDS", "MUSTER_NATS_PASSWORD", "MUSTER_NATS_USER", "MUSTER_CLIENT_")
        )
    }
    own |= {known: variables[name] for name, known in _OWN_VARIABLES.items() if variables.get(name)}
    given = nats or variables.get("MUSTER_NATS_URL")
    if given:
        parsed = parse_urls(given, "MUSTER_NATS_URL" if nats is None else "nats")
        own["MUSTER_NATS_URL"] = ",".join(parsed.urls)
        if parsed.user == user and parsed.password and not own.keys() & set(_OWN_VARIABLES.values()):
            own["MUSTER_NATS_PASSWORD"] = parsed.password
    own["MUSTER_NATS_USER"] = user
    return find_stack(StackChoice(), own, directory).bus_settings(inbox_prefix(Role.CLIENT))
