"""Settings of a service process, read once from the environment.

Why the environment: compose, the embedded stack and a person in a shell give the same variables, so there is one
code path. A secret may come as ``NAME`` or as ``NAME_FILE``, the path of a file that holds it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import uuid
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from serve_common.errors import BadField
from serve_common.identities.credentials import (
    Credentials,
    CredentialsFile,
    CredentialsUnusable,
    parse_credentials_file,
    parse_keys_file,
)
from serve_common.identities.roles import Role, inbox_prefix
from serve_common.names import check_name
from serve_common.values import shown

_PORTS: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_HOST: Final = re.compile(r"[0-9A-Fa-f:.]+|[A-Za-z0-9._-]+")
_ADVERTISED: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(:[0-9]{1,5})?|[0-9A-Fa-f:.]+")


class Environment:
    """Typed reading of environment variables; every error names the variable."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """``variables`` is given by tests; otherwise the process' own are read."""
        self._variables = os.environ if variables is None else variables

    @property
    def variables(self) -> Mapping[str, str]:
        """All variables, for those that other modules define."""
        return self._variables

    def text(self, name: str, default: str | None = None) -> str:
        """The value of ``name``; raises `BadField` when it is absent and has no default."""
        value = self._variables.get(name) or default
        if value is None:
            raise BadField(name, "is not set")
        return value

    def optional(self, name: str) -> str | None:
        """The value of ``name`` or None."""
        return self._variables.get(name) or None

    def secret(self, name: str) -> str:
        """The value of ``name``, or the content of the file that ``<name>_FILE`` names, without its last newline."""
        path = self._variables.get(f"{name}_FILE")
        if not path:
            return self.text(name)
        return _read(path, f"{name}_FILE").rstrip("\r\n")

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number between ``low`` and ``high``."""
        return int(self._number(name, default, low, high, whole=True))

    def seconds(self, name: str, default: float, low: float, high: float) -> float:
        """A duration in seconds between ``low`` and ``high``."""
        return self._number(name, default, low, high, whole=False)

    def _number(self, name: str, default: float, low: float, high: float, *, whole: bool) -> float:
        text = self._variables.get(name)
        if not text:
            return default
        try:
            value = int(text) if whole else float(text)
        except ValueError as error:
            raise BadField(name, f"{text[:40]!r} is not a number") from error
        if not low <= value <= high:
            raise BadField(name, f"is {shown(value)}; it must be between {low:g} and {high:g}")
        return value

    def identity(self, name: str) -> str:
        """A name part for this process: the variable, or else one made of the machine's name, or else a random one.

        A container keeps its host name over a restart, so its identity survives the restart too.
        """
        text = self._variables.get(name)
        if text:
            return check_name(text, name)
        host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname()).strip("-")
        return check_name(host[:63] or uuid.uuid4().hex[:12], name)


class DirectMode(Enum):
    """Which frames take direct links."""

    OFF = "off"
    BODIES = "bodies"
    """Large bodies, streams and WebSockets; every other request takes the bus."""
    ALL = "all"
    """Every request to a replica with a link."""


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach NATS as one role."""

    servers: list[str]
    """Addresses of NATS, as ``nats://host:port`` or ``tls://host:port``; several for a cluster."""
    user: str
    """A plain user's name, or, with ``credentials``, the user's name in messages."""
    password: str = ""
    """A plain user's password."""
    credentials: Credentials | None = None
    """Used instead of a plain user and password."""
    inbox_prefix: str
    """Private to the role, so that no other role can read its replies."""
    subject_prefix: str
    """First part of all subjects, so that several stacks can share one NATS."""
    tls_ca_file: str | None = None
    """File of the certificate authority that signed the servers' certificates; None uses the system's."""
    direct: DirectMode = DirectMode.ALL
    """Which frames take direct links between routers and replicas."""
    direct_dir: str = ""
    """Directory of the Unix sockets by which replicas accept direct links of their machine; empty: they accept none."""
    direct_uids: tuple[int, ...] = (0,)
    """Users whose processes may open direct links over those sockets, beside the replica's own."""
    direct_host: str = ""
    """IP address on which replicas accept direct links of other machines, over TCP with TLS; `0.0.0.0` or `::` for
    all addresses; empty: they accept none."""
    direct_ports: tuple[int, int] = (0, 0)
    """Ports for that, as `first-last`: each replica takes a free one. 0: the system chooses."""
    direct_advertise: str = ""
    """Host name or IP address that routers dial; empty: ``MUSTER_DIRECT_HOST``, or, where that is all addresses, the
    one from which the replica reaches NATS."""

    def __repr__(self) -> str:
        return f"BusSettings(servers={self.servers!r}, user={self.user!r}, …)"

    @property
    def is_plain(self) -> bool:
        """Whether the user is one of NATS' own, shared by all processes of its role."""
        return self.credentials is None


class OperationsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where `/metrics`, `/healthz` and `/readyz` are served."""

    host: str
    """Addresses to listen on: names or addresses, separated by commas; of a name, the addresses of this machine."""
    port: int
    """TCP port; 0 lets the system choose."""
    advertise: str = ""
    """How others reach it: ``host``, ``host:port`` or ``:port``. Missing parts are detected."""
    unhealthy_after_s: float = 20.0
    """Seconds that the loop may be stuck, or a NATS ping unanswered, before the process counts as unhealthy."""


def read_bus_settings(
    environment: Environment, role: Role, name: str = "", *, prefix: str = "MUSTER_NATS"
) -> BusSettings:
    """The bus settings of ``role``, and of the user ``name`` where users of that role bear names.

    A plain user where a password is given, else by a file of signing keys or of credentials. ``prefix`` is that of the
    password's variable: a replica host has its own (``MUSTER_NATS``) and its replicas' (``MUSTER_REPLICA_NATS``).
    Raises `BadField` naming the variable.
    """
    urls = environment.text("MUSTER_NATS_URL", "nats://127.0.0.1:4222")
    servers = [url.strip() for url in urls.split(",") if url.strip()]
    if not servers:
        raise BadField("MUSTER_NATS_URL", "names no server")
    password = f"{prefix}_PASSWORD"
    is_plain = any(environment.optional(each) for each in (password, f"{password}_FILE"))
    credentials = None if is_plain else read_credentials(environment, role, name)
    user = environment.text(f"{prefix}_USER", role.value)
    return BusSettings(
        servers=servers,
        user=f"{role.value} {name}".rstrip() if credentials else user,
        password=environment.secret(password) if is_plain else "",
        credentials=credentials,
        inbox_prefix=inbox_prefix(role, name),
        subject_prefix=check_name(
            environment.text("MUSTER_SUBJECT_PREFIX", "serve"), "MUSTER_SUBJECT_PREFIX"
        ),
        tls_ca_file=environment.optional("MUSTER_NATS_TLS_CA_FILE"),
        direct=read_direct_mode(environment),
        direct_dir=environment.optional("MUSTER_DIRECT_DIR") or "",
        direct_host=_direct_host(environment),
        direct_ports=_direct_ports(environment),
        direct_advertise=_direct_advertise(environment),
    )


def read_direct_mode(environment: Environment) -> DirectMode:
    """Read ``MUSTER_DIRECT``. Raises `BadField`."""
    text = environment.text("MUSTER_DIRECT", DirectMode.ALL.value)
    try:
        return DirectMode(text)
    except ValueError as error:
        known = ", ".join(mode.value for mode in DirectMode)
        raise BadField("MUSTER_DIRECT", f"{text[:40]!r} must be one of {known}") from error


def _direct_host(environment: Environment) -> str:
    text = environment.optional("MUSTER_DIRECT_HOST") or ""
    try:
        return str(ipaddress.ip_address(text)) if text else ""
    except ValueError as error:
        raise BadField("MUSTER_DIRECT_HOST", f"{text[:100]!r} is not an IP address") from error


def _direct_ports(environment: Environment) -> tuple[int, int]:
    text = environment.text("MUSTER_DIRECT_PORTS", "0")
    found = _PORTS.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (-1, -1)
    if not (first == last == 0 or 0 < first <= last <= 65_535):
        raise BadField(
            "MUSTER_DIRECT_PORTS",
            f"{text[:40]!r} must be a port, or the first and last of a range: 30000-30999",
        )
    return first, last


def _direct_advertise(environment: Environment) -> str:
    text = environment.optional("MUSTER_DIRECT_ADVERTISE") or ""
    if text and (len(text) > 255 or _HOST.fullmatch(text) is None):
        raise BadField("MUSTER_DIRECT_ADVERTISE", f"{text[:100]!r} must be a host name or an IP address")
    return text


def read_credentials(environment: Environment, role: Role, name: str) -> Credentials:
    """Read the file named by ``MUSTER_NATS_KEYS_FILE`` or ``MUSTER_NATS_CREDS_FILE``; raises `BadField`."""
    keys, file = environment.optional("MUSTER_NATS_KEYS_FILE"), environment.optional("MUSTER_NATS_CREDS_FILE")
    if keys is not None:
        text = _read(keys, "MUSTER_NATS_KEYS_FILE")
        try:
            return parse_keys_file(text, role, name)
        except CredentialsUnusable as error:
            raise BadField("MUSTER_NATS_KEYS_FILE", f"{keys} {error}") from error
    if file is not None:
        text = _read(file, "MUSTER_NATS_CREDS_FILE")
        try:
            parse_credentials_file(text)
        except CredentialsUnusable as error:
            raise BadField("MUSTER_NATS_CREDS_FILE", f"{file} {error}") from error
        return CredentialsFile(file)
    raise BadField(
        "MUSTER_NATS_CREDS_FILE",
        "is not set, nor is MUSTER_NATS_KEYS_FILE or, for a plain user, MUSTER_NATS_PASSWORD or its _FILE",
    )


def _read(path: str, field: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadField(field, f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadField(field, f"{path} is not a text file in UTF-8") from error


def read_operations_settings(environment: Environment, port_default: int) -> OperationsSettings:
    """Read the settings of this process' operations port."""
    return OperationsSettings(
        host=environment.text("MUSTER_OPS_HOST", "127.0.0.1"),
        port=environment.integer("MUSTER_OPS_PORT", port_default, 0, 65_535),
        advertise=_advertised(environment),
        unhealthy_after_s=environment.seconds("MUSTER_UNHEALTHY_AFTER_S", 20.0, 0.1, 3_600),
    )


def _advertised(environment: Environment) -> str:
    text = environment.optional("MUSTER_OPS_ADVERTISE") or ""
    found = _ADVERTISED.fullmatch(text)
    if found is None or int((found[2] or ":0")[1:]) > 65_535:
        raise BadField("MUSTER_OPS_ADVERTISE", f"{text[:100]!r} must read host, host:port or :port")
    return text
