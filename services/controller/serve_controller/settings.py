"""The controller's settings, read from environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.names import ControllerId
from serve_common.runtime.settings import (
    BusSettings,
    Environment,
    OperationsSettings,
    read_bus_settings,
    read_operations_settings,
)
from serve_common.telemetry.trace_context import TracingSettings, read_tracing_settings
from serve_controller.shell.boundary import CrashMode, read_crash_mode

_MATCHER: Final = r'[a-zA-Z_][a-zA-Z0-9_]*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\.)*"'
_SELECTOR: Final = re.compile(rf"\{{?\s*((?:{_MATCHER}\s*,\s*)*(?:{_MATCHER})?)\s*,?\s*\}}?")


NATS_MONITORS: Final = "MUSTER_NATS_MONITOR_URL"
NATS_SERVERS_MAX: Final = 16
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-f:.]+")
_PORTS: Final = {"http": 80, "https": 443}


class PrometheusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The Prometheus server that loads are read from."""

    url: str
    """Base URL of the HTTP API of a Prometheus; may contain a user, a password and a path."""
    token: str | None = None
    """Bearer token; None sends none."""
    selector: str = ""
    """Label matchers, without braces, that select the series of this instance."""

    def __repr__(self) -> str:
        return f"PrometheusSettings(selector={self.selector!r})"


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is fixed while the process lives."""

    controller_id: ControllerId
    """Id of this controller. Keeping it over a restart lets the new process lead at once, without waiting for its own
    old lease."""
    postgres_dsn: str
    """Address of Postgres, as ``postgresql://user@host:port/database`` without a password."""
    postgres_password: str
    """Password of that user."""
    bus: BusSettings
    """Connection to NATS, as role ``controller``."""
    operations: OperationsSettings
    """Where metrics and health are served."""
    tracing: TracingSettings | None = None
    """None: nothing is traced."""
    app_root: str
    """Directory that a policy function's relative app_dir is resolved against."""
    prometheus: PrometheusSettings | None = None
    """None: loads are scraped from the services."""
    nats_monitors: Mapping[str, str]
    """Base URLs of the monitoring ports of the NATS servers whose state is exported as metrics, by host and port."""
    crash_mode: CrashMode | None = None
    """For tests only: where this process kills itself."""

    def __repr__(self) -> str:
        return f"ControllerSettings(controller_id={self.controller_id!r})"


def read_settings(environment: Environment) -> ControllerSettings:
    """Read and check everything; raises `BadField` naming the variable."""
    return ControllerSettings(
        controller_id=ControllerId(environment.identity("MUSTER_CONTROLLER_ID")),
        postgres_dsn=environment.text("MUSTER_POSTGRES_DSN", "postgresql://muster@127.0.0.1:5432/muster"),
        postgres_password=environment.secret("MUSTER_POSTGRES_PASSWORD"),
        bus=read_bus_settings(environment, Role.CONTROLLER),
        operations=read_operations_settings(environment, 9101),
        tracing=read_tracing_settings(environment.variables),
        app_root=str(Path(environment.text("MUSTER_APP_ROOT", str(Path.cwd()))).absolute()),
        prometheus=read_prometheus_settings(environment),
        nats_monitors=read_nats_monitors(environment),
        crash_mode=read_crash_mode(environment),
    )


def read_prometheus_settings(environment: Environment) -> PrometheusSettings | None:
    """None when no server is named; raises `BadField` naming the variable."""
    url = environment.optional("MUSTER_PROMETHEUS_URL")
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BadField("MUSTER_PROMETHEUS_URL", "must be an address such as http://prometheus:9090")
    has_token = any(environment.optional(f"MUSTER_PROMETHEUS_TOKEN{way}") for way in ("", "_FILE"))
    return PrometheusSettings(
        url=url,
        token=environment.secret("MUSTER_PROMETHEUS_TOKEN") if has_token else None,
        selector=check_selector(
            environment.optional("MUSTER_PROMETHEUS_SELECTOR") or "", "MUSTER_PROMETHEUS_SELECTOR"
        ),
    )


def check_selector(text: str, field: str) -> str:
    """The label matchers of ``{cluster="a"}`` without their braces; raises `BadField` when they are none."""
    matched = _SELECTOR.fullmatch(text.strip())
    if matched is None:
        raise BadField(field, f'{text[:100]!r} must be label matchers, such as {{cluster="a"}}')
    return matched[1].strip().rstrip(",")


def read_nats_monitors(environment: Environment) -> dict[str, str]:
    """Read the comma-separated URLs of `NATS_MONITORS`, by host and port; raises `BadField` naming the variable.

    Why a name for each server: it becomes a metric label, so it must contain no password, must be known also while the
    server does not respond, and takes a bounded number of values.
    """
    urls = [url.strip() for url in (environment.optional(NATS_MONITORS) or "").split(",") if url.strip()]
    if len(urls) > NATS_SERVERS_MAX:
        raise BadField(NATS_MONITORS, f"names {len(urls)} servers; {NATS_SERVERS_MAX} are possible")
    monitors = {_server_name(url): url for url in urls}
    if len(monitors) < len(urls):
        raise BadField(NATS_MONITORS, "names a server twice")
    return monitors


def _server_name(url: str) -> str:
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
        raise BadField(NATS_MONITORS, "must be addresses such as http://nats:8222, separated by commas")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
