"""Settings of the console, read from its environment."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Final

import msgspec

from muster.client.requests import StackAddress, parse_urls
from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.names import check_name
from serve_common.runtime.settings import Environment, OperationsSettings, read_operations_settings

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_TRUSTED_HEADER: Final = "MUSTER_CONSOLE_TRUSTED_HEADER"
_TRUSTED_FROM: Final = "MUSTER_CONSOLE_TRUSTED_FROM"
_ROLE_HEADER: Final = "MUSTER_CONSOLE_ROLE_HEADER"
_ALLOWED_HOSTS: Final = "MUSTER_CONSOLE_ALLOWED_HOSTS"
_HOST_NAME: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class TrustedSignIn(msgspec.Struct, frozen=True, kw_only=True):
    """Sign-in by a proxy in front of the console, which puts the person's name into a header."""

    header: str
    """Header in which a proxy in front names the person who it signed in."""
    role_header: str | None
    """Header with the person's role: view, operate or admin; None: all have the one role."""
    role: Role
    """Role of a person without one in a header."""
    networks: tuple[Network, ...]
    """Addresses or networks of the proxies that are believed, separated by commas; the headers of all others are
    ignored."""
    credentials: dict[Role, str]
    """Files of the identities by role. Those who can read them have these rights, so they are set for this only."""


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the console."""

    stack: StackAddress
    """Where NATS is; people bring their own identities."""
    operations: OperationsSettings
    """Where metrics and health are served."""
    http_host: str
    """Address that pages are served on; the loopback unless told otherwise."""
    http_port: int
    """TCP port that pages are served on; 0 lets the system choose."""
    allowed_hosts: frozenset[str]
    """Names under which browsers reach the console, separated by commas; addresses and localhost need not be among
    them. Under any other name it serves nothing, as that may be a page of another site that leads here."""
    people_file: Path | None
    """File of the people who may sign in by password; read again when it changes. None: nobody."""
    trusted: TrustedSignIn | None
    """Sign-in by a proxy in front; None: by password only."""
    is_https: bool
    """1 if browsers reach the console by HTTPS, so that cookies are sent over that only."""
    session_idle_s: float
    """Seconds without use after which a session ends."""
    session_longest_s: float
    """Seconds after which a session ends in any case."""
    http_url: str
    """Base URL at which endpoints are called, for the commands that pages show; empty: the proxies' own addresses."""
    grafana_url: str
    """Base URL of Grafana for links; empty: no links."""
    traces_url: str
    """URL of a trace for links, with ``{trace_id}`` in it; empty: no links."""
    apps_dir: str
    """Directory of applications as replica hosts see it, which a deploy proposes."""


def read_settings(environment: Environment) -> ConsoleSettings:
    """Read the settings. Raises `BadField` naming the variable."""
    parsed = parse_urls(environment.text("MUSTER_NATS_URL", "nats://127.0.0.1:4222"), "MUSTER_NATS_URL")
    people = environment.optional("MUSTER_CONSOLE_USERS_FILE")
    trusted = _read_trusted(environment)
    if people is None and trusted is None:
        raise BadField("MUSTER_CONSOLE_USERS_FILE", f"is not set, nor is {_TRUSTED_HEADER}")
    traces_url = environment.optional("MUSTER_CONSOLE_TRACES_URL") or ""
    if traces_url and "{trace_id}" not in traces_url:
        raise BadField("MUSTER_CONSOLE_TRACES_URL", "must have {trace_id} in it")
    return ConsoleSettings(
        stack=StackAddress(
            urls=parsed.urls,
            subject_prefix=check_name(
                environment.text("MUSTER_SUBJECT_PREFIX", "serve"), "MUSTER_SUBJECT_PREFIX"
            ),
            tls_ca_file=environment.optional("MUSTER_NATS_TLS_CA_FILE"),
        ),
        operations=read_operations_settings(environment, 9104),
        http_host=environment.text("MUSTER_CONSOLE_HOST", "127.0.0.1"),
        http_port=environment.integer("MUSTER_CONSOLE_PORT", 8080, 0, 65_535),
        allowed_hosts=_read_hosts(environment),
        people_file=None if people is None else Path(people),
        trusted=trusted,
        is_https=environment.integer("MUSTER_CONSOLE_HTTPS", 0, 0, 1) == 1,
        session_idle_s=environment.seconds("MUSTER_CONSOLE_SESSION_IDLE_S", 8 * 3600.0, 60, 30 * 86_400),
        session_longest_s=environment.seconds("MUSTER_CONSOLE_SESSION_S", 7 * 86_400.0, 60, 90 * 86_400),
        http_url=_url(environment, "MUSTER_CONSOLE_HTTP_URL"),
        grafana_url=_url(environment, "MUSTER_CONSOLE_GRAFANA_URL"),
        traces_url=_url(environment, "MUSTER_CONSOLE_TRACES_URL"),
        apps_dir=environment.optional("MUSTER_CONSOLE_APPS_DIR") or "",
    )


def _read_hosts(environment: Environment) -> frozenset[str]:
    text = environment.optional(_ALLOWED_HOSTS) or ""
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    for name in names:
        if not _HOST_NAME.fullmatch(name):
            raise BadField(_ALLOWED_HOSTS, f"{name[:80]!r} is not the name of a host without scheme and port")
    return frozenset(names)


def _url(environment: Environment, name: str) -> str:
    text = environment.optional(name) or ""
    if text and not text.startswith(("http://", "https://")):
        raise BadField(name, "must begin with http:// or https://")
    return text.rstrip("/")


def _read_trusted(environment: Environment) -> TrustedSignIn | None:
    header = environment.optional(_TRUSTED_HEADER)
    if header is None:
        return None
    try:
        networks = tuple(
            ipaddress.ip_network(part.strip()) for part in environment.text(_TRUSTED_FROM).split(",")
        )
    except ValueError as error:
        raise BadField(
            _TRUSTED_FROM, f"must be addresses or networks, separated by commas: {error}"
        ) from error
    files = {
        role: path
        for role in (Role.VIEW, Role.OPERATE, Role.ADMIN)
        if (path := environment.optional(f"MUSTER_CONSOLE_{role.name}_CREDS_FILE")) is not None
    }
    text = environment.text("MUSTER_CONSOLE_TRUSTED_ROLE", Role.VIEW.value)
    role = {each.value: each for each in files}.get(text)
    if role is None:
        raise BadField("MUSTER_CONSOLE_TRUSTED_ROLE", f"{text[:40]!r} has no MUSTER_CONSOLE_…_CREDS_FILE")
    return TrustedSignIn(
        header=header,
        role_header=environment.optional(_ROLE_HEADER),
        role=role,
        networks=networks,
        credentials=files,
    )
