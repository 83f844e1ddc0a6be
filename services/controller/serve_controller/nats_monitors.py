"""The monitoring ports of NATS servers, read from the environment.

Why a name for each server: it becomes a metric label, so it must contain no password, must be known also while the
server does not respond, and takes a bounded number of values.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

import msgspec

from serve_common.errors import BadField
from serve_common.runtime.settings import Environment

VARIABLE: Final = "MUSTER_NATS_MONITOR_URL"
SERVERS_MAX: Final = 16
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-f:.]+")
_PORTS: Final = {"http": 80, "https": 443}


class NatsMonitor(msgspec.Struct, frozen=True, kw_only=True):
    """One server's monitoring port."""

    server: str
    """Its host and port."""
    url: str
    """Base URL of its pages; may contain a user, a password and a path."""

    def __repr__(self) -> str:
        return f"NatsMonitor(server={self.server!r})"


def read_nats_monitors(environment: Environment) -> tuple[NatsMonitor, ...]:
    """Read the comma-separated URLs of the variable; raises `BadField` naming the variable."""
    written = (environment.optional(VARIABLE) or "").split(",")
    monitors = tuple(_monitor(url.strip()) for url in written if url.strip())
    if len(monitors) > SERVERS_MAX:
        raise BadField(VARIABLE, f"names {len(monitors)} servers; {SERVERS_MAX} are possible")
    if len({monitor.server for monitor in monitors}) < len(monitors):
        raise BadField(VARIABLE, "names a server twice")
    return monitors


def _monitor(url: str) -> NatsMonitor:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        host = port = None
    if (
        not host
        or not _HOST.fullmatch(host)
        or not port
        or parts.scheme not in _PORTS
        or parts.query
        or parts.fragment
    ):
        raise BadField(VARIABLE, "must be addresses such as http://nats:8222, separated by commas")
    return NatsMonitor(server=f"[{host}]:{port}" if ":" in host else f"{host}:{port}", url=url)
