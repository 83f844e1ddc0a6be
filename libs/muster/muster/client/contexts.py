"""Named stacks of a user: where each is, and which files hold its credentials. Holds no secret.

Why nothing of a context is mixed with variables of the environment: a password for one machine must not reach another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from serve_common.errors import BadField
from serve_common.names import check_name

LOCAL: Final = "local"
"""Name that stands for no context: the stack is searched from the working directory."""
OWN_ADDRESS: Final = (
    "MUSTER_NATS_URL",
    "MUSTER_STATE_DIR",
    "MUSTER_NATS_CREDS_FILE",
    "MUSTER_NATS_PASSWORD",
    "MUSTER_NATS_PASSWORD_FILE",
)
"""Variables that name a stack or its credentials: with one of them, no context is used unless an option names it."""
_CONTEXTS_MAX: Final = 1000


class Context(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One named stack. Paths are absolute."""

    nats: str
    """URLs of NATS, without user and password."""
    creds: str | None = None
    """File of NATS credentials for commands and for programs that deploy."""
    client_creds: str | None = None
    """File of NATS credentials for deployment handles."""
    user: str | None = None
    """User of a NATS with plain users."""
    password_file: str | None = None
    """File with that user's password."""
    tls_ca_file: str | None = None
    """Authorities to trust for ``tls://``."""
    subject_prefix: str = "serve"
    """First token of all subjects of the stack."""
    http: str = ""
    """Base URL at which users reach HTTP; empty: the proxies' own addresses."""


class Contexts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the user's file."""

    current: str | None = None
    """Name of the context in use; None is none."""
    contexts: dict[str, Context] = {}


def contexts_file(variables: Mapping[str, str]) -> Path | None:
    """``muster/contexts.json`` in the user's directory of configuration; None for a user without one."""
    config = variables.get("XDG_CONFIG_HOME")
    if not config and not variables.get("HOME"):
        return None
    return (Path(config) if config else Path(variables["HOME"]) / ".config") / "muster" / "contexts.json"


def read_contexts(variables: Mapping[str, str]) -> Contexts:
    """The user's contexts; none without a file. Raises `BadField` for a file that cannot be used."""
    path = contexts_file(variables)
    try:
        return Contexts() if path is None else msgspec.json.decode(path.read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (OSError, msgspec.DecodeError) as error:
        raise BadField(str(path), f"cannot be used: {error}; mend or delete it") from error


def write_contexts(variables: Mapping[str, str], contexts: Contexts) -> None:
    """Replace the user's file atomically; only its owner may read it. Raises `BadField`."""
    path = contexts_file(variables)
    if path is None:
        raise BadField("HOME", "is not set, so there is no place for contexts; set it, or XDG_CONFIG_HOME")
    if len(contexts.contexts) > _CONTEXTS_MAX:
        raise BadField("NAME", f"there are {_CONTEXTS_MAX} contexts already")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(contexts), indent=2) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise BadField(str(path), f"cannot be written: {error.strerror}") from error


def choose_context(name: str | None, variables: Mapping[str, str]) -> Context | None:
    """The context ``name``, or else that of MUSTER_CONTEXT, or else the one in use; None for none.

    Raises `BadField` for a name that is not there.
    """
    field = "--context"
    if name is None:
        if any(variables.get(each) for each in OWN_ADDRESS):
            return None
        field = "MUSTER_CONTEXT"
        name = variables.get(field) or None
    if name == LOCAL:
        return None
    contexts = read_contexts(variables)
    name = name or contexts.current
    return None if name is None else get_context(contexts, name, field)


def get_context(contexts: Contexts, name: str, field: str) -> Context:
    """The context of that name. Raises `BadField` naming ``field`` when there is none."""
    check_name(name, field)
    found = contexts.contexts.get(name)
    if found is None:
        there = ", ".join(sorted(contexts.contexts)) or "none"
        raise BadField(field, f"there is no context {name!r}; there are: {there}")
    return found
