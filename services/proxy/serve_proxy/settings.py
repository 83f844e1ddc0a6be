"""Settings of the proxy, read from its environment."""

from __future__ import annotations

from typing import Final

import msgspec

from serve_common.config.backend import HttpOptions
from serve_common.dispatch.request_body import BODIES_BYTES_MAX
from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.names import ProxyId
from serve_common.runtime.settings import (
    BusSettings,
    Environment,
    OperationsSettings,
    read_bus_settings,
    read_operations_settings,
)
from serve_common.telemetry.trace_context import TracingSettings, read_tracing_settings
from serve_proxy.core.processes import PARENT_FD, PROCESSES_MAX

FORWARDED_HOPS_MAX: Final = 10
CERT_FILE: Final = "MUSTER_HTTP_TLS_CERT_FILE"
_KEY_FILE: Final = "MUSTER_HTTP_TLS_KEY_FILE"
_KEY_PASSWORD: Final = "MUSTER_HTTP_TLS_KEY_PASSWORD"  # noqa: S105 - a name


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate that clients get."""

    cert_file: str
    """File of the certificate for HTTPS and of those that lead to its authority, in PEM; unset serves plain HTTP. It is
    read again when it changes."""
    key_file: str | None
    """File of the certificate's private key, in PEM; unset takes it from the certificate's file."""
    key_password: str
    """Password of the key; empty for none."""

    def __repr__(self) -> str:
        return f"TlsSettings(cert_file={self.cert_file!r}, key_file={self.key_file!r}, …)"


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one proxy process."""

    proxy_id: ProxyId
    """Id of this proxy, unique among all; the machine's name unless set."""
    bus: BusSettings
    """Connection to NATS, as role ``proxy``."""
    operations: OperationsSettings
    """Where metrics and health are served."""
    http_host: str
    """Address that HTTP is served on."""
    http_port: int
    """TCP port that HTTP is served on; 0 lets the system choose."""
    closes_when_shut_down: bool = False
    """Whether the port is closed from a shutdown until the next deploy, as Ray Serve's is."""
    http: HttpOptions
    """Defaults until the controller has published HTTP options."""
    tls: TlsSettings | None = None
    """Certificate of HTTPS; None serves plain HTTP."""
    drain_timeout_s: float
    """Seconds that requests in flight may take to finish after a stop signal."""
    bus_wait_s: float
    """Seconds that a request waits for NATS to reconnect before it fails with 503."""
    body_memory_max: int = BODIES_BYTES_MAX
    """Maximum bytes of the bodies of all requests in flight in one process; a request beyond it fails with 503."""
    processes: int = 1
    """Above 1, this process is the parent of that many proxies which share a port."""
    parent_fd: int | None = None
    """In a child, the descriptor of the socket to its parent; it then shares the HTTP port with its siblings."""
    tracing: TracingSettings | None = None
    """Tracing; None turns it off."""
    middleware_dir: str | None = None
    """Directory appended to ``sys.path``, for middlewares."""
    forwarded_hops: int = 0
    """Number of load balancers in front that are trusted to add their peer's address to ``X-Forwarded-For``.

    With 0, all forwarding headers of requests are dropped. Otherwise the nearest one must set or remove every
    ``X-Forwarded-…``, ``Forwarded`` and ``X-Real-IP``. Applies to applications, the access log and rate limits."""
    uncounted: frozenset[str] = frozenset()
    """Tags of endpoints whose requests are not counted; used to measure the cost of counting."""


def read_settings(environment: Environment) -> ProxySettings:
    """Read the settings. Raises `BadField` naming the variable."""
    defaults = HttpOptions()
    proxy_id = ProxyId(environment.identity("MUSTER_PROXY_ID"))
    return ProxySettings(
        proxy_id=proxy_id,
        bus=read_bus_settings(environment, Role.PROXY, proxy_id),
        operations=read_operations_settings(environment, 9102),
        http_host=environment.text("MUSTER_HTTP_HOST", "127.0.0.1"),
        http_port=environment.integer("MUSTER_HTTP_PORT", 8000, 0, 65_535),
        closes_when_shut_down=environment.integer("MUSTER_HTTP_CLOSES_WHEN_SHUT_DOWN", 0, 0, 1) == 1,
        http=HttpOptions(
            request_timeout_s=environment.seconds(
                "MUSTER_REQUEST_TIMEOUT_S", defaults.request_timeout_s, 0.1, 86_400
            ),
            body_bytes_max=environment.integer(
                "MUSTER_BODY_BYTES_MAX", defaults.body_bytes_max, 0, 256 * 1024 * 1024
            ),
        ),
        tls=_read_tls_settings(environment),
        drain_timeout_s=environment.seconds("MUSTER_DRAIN_TIMEOUT_S", 30.0, 0, 3_600),
        bus_wait_s=environment.seconds("MUSTER_BUS_WAIT_S", 5.0, 0, 60),
        body_memory_max=environment.integer(
            "MUSTER_BODY_MEMORY_MAX", BODIES_BYTES_MAX, 1024 * 1024, 64 * 1024 * 1024 * 1024
        ),
        processes=environment.integer("MUSTER_PROXY_PROCESSES", 1, 1, PROCESSES_MAX),
        parent_fd=environment.integer(PARENT_FD, -1, 0, 1_000_000)
        if environment.optional(PARENT_FD)
        else None,
        tracing=read_tracing_settings(environment.variables),
        middleware_dir=environment.optional("MUSTER_MIDDLEWARE_DIR"),
        forwarded_hops=environment.integer("MUSTER_FORWARDED_HOPS", 0, 0, FORWARDED_HOPS_MAX),
        uncounted=frozenset((environment.optional("MUSTER_UNCOUNTED") or "").split()),
    )


def _read_tls_settings(environment: Environment) -> TlsSettings | None:
    cert_file, key_file = environment.optional(CERT_FILE), environment.optional(_KEY_FILE)
    has_password = any(environment.optional(name) for name in (_KEY_PASSWORD, f"{_KEY_PASSWORD}_FILE"))
    if cert_file is None:
        if key_file is not None or has_password:
            raise BadField(CERT_FILE, f"must be set where {_KEY_FILE} or {_KEY_PASSWORD} is")
        return None
    password = environment.secret(_KEY_PASSWORD) if has_password else ""
    return TlsSettings(cert_file=cert_file, key_file=key_file, key_password=password)
