"""The page of environment variables: names, defaults and ranges as the services read them, meanings of their fields.

Why recorded: reading the settings in an environment that takes notes cannot miss a default that was changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from docs.generator.structs import GENERATED, field_docs, number, table
from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.runtime.settings import (
    BusSettings,
    Environment,
    OperationsSettings,
    read_bus_settings,
    read_operations_settings,
)
from serve_console.settings import ConsoleSettings, TrustedSignIn
from serve_console.settings import read_settings as read_console_settings
from serve_controller.settings import ControllerSettings, PrometheusSettings
from serve_controller.settings import read_settings as read_controller_settings
from serve_proxy.middlewares.cors import read_cors_rules
from serve_proxy.middlewares.rate_limit import RateRules, read_rate_rules
from serve_proxy.settings import ProxySettings, TlsSettings
from serve_proxy.settings import read_settings as read_proxy_settings
from serve_replica_host.settings import HostSettings, read_host_settings

ROOT: Final = Path(__file__).parents[2]


class Variable(NamedTuple):
    """One row of a table."""

    name: str
    meaning: str | tuple[type, str]
    """Text, or the class and field whose meaning it is."""
    default: str | None = None
    """Instead of the recorded one."""


class Read(NamedTuple):
    """How a variable is read."""

    default: str
    range: str


class RecordingEnvironment(Environment):
    """An environment that notes how each variable is read."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.reads: dict[str, Read] = {}

    def text(self, name: str, default: str | None = None) -> str:
        """As in `Environment`."""
        self._note(name, "required" if default is None else default)
        return super().text(name, default)

    def optional(self, name: str) -> str | None:
        """As in `Environment`."""
        self._note(name, "")
        return super().optional(name)

    def identity(self, name: str) -> str:
        """As in `Environment`."""
        self._note(name, "the machine's name")
        return super().identity(name)

    def _number(self, name: str, default: float, low: float, high: float, *, whole: bool) -> float:
        self._note(name, f"{default:.15g}", f"{number(low)} to {number(high)}")
        return super()._number(name, default, low, high, whole=whole)

    def _note(self, name: str, default: str, limits: str = "") -> None:
        if limits or not self.reads.get(name, Read("", "")).default:
            self.reads[name] = Read(default, limits)


class Section(NamedTuple):
    """One table of the page."""

    title: str
    intro: str
    read: Callable[[RecordingEnvironment], object]
    """Reads all variables of the section."""
    rows: tuple[Variable, ...]


_PRESENT: Final = {
    "MUSTER_CONSOLE_TRUSTED_FROM": "127.0.0.1",
    "MUSTER_CONSOLE_TRUSTED_HEADER": "X-Forwarded-User",
    "MUSTER_CONSOLE_VIEW_CREDS_FILE": "/secrets/view.creds",
    "MUSTER_CORS_ALLOW_ORIGINS": "https://example.org",
    "MUSTER_CRASH_PROBABILITY": "0.1",
    "MUSTER_NATS_PASSWORD": "a",
    "MUSTER_POSTGRES_PASSWORD": "a",
    "MUSTER_PROMETHEUS_TOKEN": "a",
    "MUSTER_PROMETHEUS_URL": "http://127.0.0.1",
    "MUSTER_RATE_LIMIT_PER_S": "1",
    "MUSTER_REPLICA_NATS_PASSWORD": "a",
}
"""Variables without which others are not read."""


def record(section: Section) -> dict[str, Read]:
    """How each variable of a section is read."""
    environment = RecordingEnvironment(_PRESENT)
    section.read(environment)
    without = RecordingEnvironment({})
    with suppress(BadField):
        section.read(without)  # credentials are read only where there is no password
    return without.reads | environment.reads


def _read_everywhere(environment: RecordingEnvironment) -> None:
    read_operations_settings(environment, 9101)
    read_bus_settings(environment, Role.CONTROLLER)


def _read_middlewares(environment: RecordingEnvironment) -> None:
    read_rate_rules(environment)
    read_cors_rules(environment)


def _read_nothing(_environment: RecordingEnvironment) -> None:
    """For variables that are not read by `Environment`."""


_OF_PLAIN_USER: Final = (
    "Password of a plain user, for a NATS without identities; used instead of those. Or `{}_FILE`."
)
_APP_ROOT: Final = "the working directory"

SECTIONS: Final = (
    Section(
        "Every service",
        "Controller, proxy and replica host; the console as its own section says.",
        _read_everywhere,
        (
            Variable("MUSTER_NATS_URL", (BusSettings, "servers")),
            Variable("MUSTER_NATS_CREDS_FILE", "File of a controller's credentials."),
            Variable(
                "MUSTER_NATS_KEYS_FILE",
                "File of signing keys, with which a proxy or replica host makes identities of its own name.",
            ),
            Variable("MUSTER_NATS_USER", "Name of a plain user.", "the role"),
            Variable("MUSTER_NATS_PASSWORD", _OF_PLAIN_USER.format("MUSTER_NATS_PASSWORD"), ""),
            Variable("MUSTER_NATS_TLS_CA_FILE", (BusSettings, "tls_ca_file")),
            Variable("MUSTER_SUBJECT_PREFIX", (BusSettings, "subject_prefix")),
            Variable(
                "MUSTER_DIRECT",
                "What takes [direct links](../concepts.md#direct-links) between routers and replicas instead of NATS: "
                "`off`, `bodies` (large bodies, streams and WebSockets) or `all` (also small requests, to replicas "
                "that get many; a proxy then polls up to 0.2 ms for the response to a single one). Proxies and replica "
                "hosts read it.",
            ),
            Variable(
                "MUSTER_DIRECT_DIR", (BusSettings, "direct_dir"), "replicas accept none of their machine"
            ),
            Variable(
                "MUSTER_DIRECT_HOST", (BusSettings, "direct_host"), "replicas accept none of other machines"
            ),
            Variable("MUSTER_DIRECT_PORTS", (BusSettings, "direct_ports"), "0"),
            Variable("MUSTER_DIRECT_ADVERTISE", (BusSettings, "direct_advertise"), "as described"),
            Variable("MUSTER_OPS_HOST", (OperationsSettings, "host")),
            Variable(
                "MUSTER_OPS_PORT",
                (OperationsSettings, "port"),
                "9101 (controller), 9102 (proxy), 9103 (replica host), 9104 (console)",
            ),
            Variable("MUSTER_OPS_ADVERTISE", (OperationsSettings, "advertise")),
            Variable("MUSTER_UNHEALTHY_AFTER_S", (OperationsSettings, "unhealthy_after_s")),
            Variable(
                "MUSTER_LOG_LEVEL", "Lowest level logged: DEBUG, INFO, WARNING, ERROR or CRITICAL.", "INFO"
            ),
        ),
    ),
    Section(
        "Controller",
        "",
        read_controller_settings,
        (
            Variable("MUSTER_CONTROLLER_ID", (ControllerSettings, "controller_id")),
            Variable("MUSTER_POSTGRES_DSN", (ControllerSettings, "postgres_dsn")),
            Variable(
                "MUSTER_POSTGRES_PASSWORD", "Password of that user. Or `MUSTER_POSTGRES_PASSWORD_FILE`."
            ),
            Variable("MUSTER_APP_ROOT", (ControllerSettings, "app_root"), _APP_ROOT),
            Variable("MUSTER_PROMETHEUS_URL", (PrometheusSettings, "url"), "loads are scraped"),
            Variable(
                "MUSTER_PROMETHEUS_TOKEN", "Bearer token for it. Or `MUSTER_PROMETHEUS_TOKEN_FILE`.", ""
            ),
            Variable("MUSTER_PROMETHEUS_SELECTOR", (PrometheusSettings, "selector")),
            Variable(
                "MUSTER_NATS_MONITOR_URL",
                "Addresses of NATS servers' monitoring ports, separated by commas; their state is exported as metrics.",
            ),
            Variable(
                "MUSTER_CRASH_AT", "For tests: the effect before or after which the controller kills itself."
            ),
            Variable(
                "MUSTER_CRASH_PROBABILITY",
                "For tests: probability of a crash before each effect, and after it.",
            ),
            Variable("MUSTER_CRASH_SEED", "For tests: seed of those crashes.", "random"),
        ),
    ),
    Section(
        "Proxy",
        "",
        read_proxy_settings,
        (
            Variable("MUSTER_PROXY_ID", (ProxySettings, "proxy_id")),
            Variable("MUSTER_HTTP_HOST", (ProxySettings, "http_host")),
            Variable("MUSTER_HTTP_PORT", (ProxySettings, "http_port")),
            Variable("MUSTER_HTTP_CLOSES_WHEN_SHUT_DOWN", (ProxySettings, "closes_when_shut_down")),
            Variable("MUSTER_HTTP_TLS_CERT_FILE", (TlsSettings, "cert_file")),
            Variable("MUSTER_HTTP_TLS_KEY_FILE", (TlsSettings, "key_file")),
            Variable(
                "MUSTER_HTTP_TLS_KEY_PASSWORD", "Password of the key. Or `MUSTER_HTTP_TLS_KEY_PASSWORD_FILE`."
            ),
            Variable("MUSTER_PROXY_PROCESSES", (ProxySettings, "processes")),
            Variable("MUSTER_FORWARDED_HOPS", (ProxySettings, "forwarded_hops")),
            Variable("MUSTER_MIDDLEWARE_DIR", (ProxySettings, "middleware_dir")),
            Variable("MUSTER_BODY_MEMORY_MAX", (ProxySettings, "body_memory_max")),
            Variable("MUSTER_BUS_WAIT_S", (ProxySettings, "bus_wait_s")),
            Variable("MUSTER_DRAIN_TIMEOUT_S", (ProxySettings, "drain_timeout_s")),
            Variable(
                "MUSTER_REQUEST_TIMEOUT_S",
                "Seconds from a request's arrival to the start of its response; until the controller publishes "
                "`HttpOptions`.",
            ),
            Variable(
                "MUSTER_BODY_BYTES_MAX",
                "Largest accepted request body, in bytes; until the controller publishes `HttpOptions`.",
            ),
            Variable("MUSTER_UNCOUNTED", (ProxySettings, "uncounted"), "none"),
        ),
    ),
    Section(
        "Middlewares of the proxy",
        "Each is read only where its middleware is in `HttpOptions.middlewares`.",
        _read_middlewares,
        (
            Variable(
                "MUSTER_API_KEYS_FILE",
                "`serve_proxy.middlewares.api_keys:api_keys`: file of the keys; read again when it changes.",
                "required",
            ),
            Variable(
                "MUSTER_CORS_ALLOW_ORIGINS",
                "`serve_proxy.middlewares.cors:cors`: origins separated by commas, such as `https://*.example.org`; "
                "`*` for any.",
            ),
            Variable(
                "MUSTER_CORS_ALLOW_METHODS", "Methods that pages of those origins may use; `*` for any."
            ),
            Variable("MUSTER_CORS_ALLOW_HEADERS", "Request headers that they may send; `*` for any."),
            Variable("MUSTER_CORS_EXPOSE_HEADERS", "Response headers that they may read."),
            Variable(
                "MUSTER_CORS_ALLOW_CREDENTIALS", "Whether they may send cookies and credentials.", "false"
            ),
            Variable(
                "MUSTER_CORS_MAX_AGE_S", "Seconds for which browsers may cache the reply to a preflight."
            ),
            Variable(
                "MUSTER_RATE_LIMIT_PER_S",
                "`serve_proxy.middlewares.rate_limit:rate_limit`: requests per second of a caller at a process.",
                "required",
            ),
            Variable("MUSTER_RATE_LIMIT_BURST", "Requests that a caller may send at once.", "one second's"),
            Variable(
                "MUSTER_RATE_LIMIT_BY",
                "What tells callers apart: `key` (of the API), `address`, or `header:<name>`.",
            ),
            Variable("MUSTER_RATE_LIMIT_KEYS_MAX", (RateRules, "keys_max")),
        ),
    ),
    Section(
        "Replica host",
        "",
        read_host_settings,
        (
            Variable("MUSTER_HOST_ID", (HostSettings, "host_id")),
            Variable(
                "MUSTER_NUM_CPUS",
                (
                    "CPUs that replicas may reserve; 0 for those of the machine, at least 8. With ``RAY_ADDRESS``: in "
                    "place of the cluster's, and Ray is asked for none."
                ),
            ),
            Variable("MUSTER_APP_ROOT", (HostSettings, "app_root"), _APP_ROOT),
            Variable("MUSTER_HOST_USER", (HostSettings, "host_user")),
            Variable("MUSTER_REPLICA_USER", (HostSettings, "replica_user")),
            Variable("MUSTER_SPARE_REPLICAS", (HostSettings, "spare_replicas")),
            Variable("MUSTER_DRAIN_TIMEOUT_S", (HostSettings, "drain_timeout_s")),
            Variable("MUSTER_REPLICA_IDENTITY_S", (HostSettings, "replica_identity_s")),
            Variable("MUSTER_REPLICA_NATS_USER", "Name of the plain user of its replicas.", "replica"),
            Variable(
                "MUSTER_REPLICA_NATS_PASSWORD", _OF_PLAIN_USER.format("MUSTER_REPLICA_NATS_PASSWORD"), ""
            ),
            Variable(
                "MUSTER_RAY_TEMP_DIR", (HostSettings, "ray_temp_dir"), "muster-ray, among temporary files"
            ),
            Variable("MUSTER_CODE_DIR", (HostSettings, "code_dir"), "below the host's own directory"),
            Variable("RAY_ADDRESS", (HostSettings, "ray_address")),
            Variable(
                "PROMETHEUS_MULTIPROC_DIR", (HostSettings, "metrics_dir"), "below the host's own directory"
            ),
        ),
    ),
    Section(
        "Console",
        "It has no identity of its own: the variables of every service about NATS that it reads are `MUSTER_NATS_URL`, "
        "`MUSTER_NATS_TLS_CA_FILE` and `MUSTER_SUBJECT_PREFIX`. [The console](../how-to/console.md) has examples.",
        read_console_settings,
        (
            Variable("MUSTER_CONSOLE_HOST", (ConsoleSettings, "http_host")),
            Variable("MUSTER_CONSOLE_PORT", (ConsoleSettings, "http_port")),
            Variable("MUSTER_CONSOLE_ALLOWED_HOSTS", (ConsoleSettings, "allowed_hosts"), "none"),
            Variable("MUSTER_CONSOLE_USERS_FILE", (ConsoleSettings, "people_file"), ""),
            Variable("MUSTER_CONSOLE_HTTPS", (ConsoleSettings, "is_https")),
            Variable("MUSTER_CONSOLE_SESSION_IDLE_S", (ConsoleSettings, "session_idle_s")),
            Variable("MUSTER_CONSOLE_SESSION_S", (ConsoleSettings, "session_longest_s")),
            Variable("MUSTER_CONSOLE_HTTP_URL", (ConsoleSettings, "http_url")),
            Variable("MUSTER_CONSOLE_GRAFANA_URL", (ConsoleSettings, "grafana_url")),
            Variable("MUSTER_CONSOLE_TRACES_URL", (ConsoleSettings, "traces_url")),
            Variable("MUSTER_CONSOLE_APPS_DIR", (ConsoleSettings, "apps_dir")),
            Variable(
                "MUSTER_CONSOLE_TRUSTED_HEADER", (TrustedSignIn, "header"), "people sign in by password"
            ),
            Variable("MUSTER_CONSOLE_TRUSTED_FROM", (TrustedSignIn, "networks")),
            Variable("MUSTER_CONSOLE_ROLE_HEADER", (TrustedSignIn, "role_header")),
            Variable("MUSTER_CONSOLE_TRUSTED_ROLE", (TrustedSignIn, "role")),
            *(
                Variable(
                    f"MUSTER_CONSOLE_{role}_CREDS_FILE",
                    f"File of the credentials with which people of the role {role.lower()} reach NATS whom a header "
                    "names, such as "
                    f"`secrets/{role.lower()}.creds`; unset: nobody has that role by header.",
                )
                for role in ("VIEW", "OPERATE", "ADMIN")
            ),
        ),
    ),
    Section(
        "Traces",
        "OpenTelemetry's own variables, read by every service; [its specification]"
        "(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/) has the rest.",
        _read_nothing,
        (
            Variable(
                "OTEL_EXPORTER_OTLP_ENDPOINT", "Address that traces are sent to; unset turns tracing off.", ""
            ),
            Variable("OTEL_EXPORTER_OTLP_HEADERS", "Headers for it, such as a token.", ""),
            Variable("OTEL_EXPORTER_OTLP_PROTOCOL", "Protocol; no other is supported.", "http/protobuf"),
            Variable("OTEL_RESOURCE_ATTRIBUTES", "Attributes of every span, such as `team=a,stage=b`.", ""),
            Variable("OTEL_TRACES_SAMPLER", "Which traces are recorded.", "parentbased_always_on"),
            Variable("OTEL_TRACES_SAMPLER_ARG", "Share of traces that a ratio sampler records, 0 to 1.", "1"),
            Variable("OTEL_TRACES_EXPORTER", "Traces are sent unless it lacks `otlp`.", "otlp"),
            Variable("OTEL_SDK_DISABLED", "`true` turns tracing off.", "false"),
        ),
    ),
    Section(
        "The program `muster`",
        "Options of the command line come first; without either, the stack that runs from here is used.",
        _read_nothing,
        (
            Variable(
                "MUSTER_NATS_URL", "NATS servers of the stack, as `nats://user:password@host:port`.", ""
            ),
            Variable(
                "MUSTER_NATS_CREDS_FILE", "File of NATS credentials, such as `secrets/admin.creds`.", ""
            ),
            Variable("MUSTER_NATS_USER", "User of a NATS with plain users.", "admin"),
            Variable("MUSTER_NATS_PASSWORD", "Password of that user. Or `MUSTER_NATS_PASSWORD_FILE`.", ""),
            Variable("MUSTER_NATS_TLS_CA_FILE", (BusSettings, "tls_ca_file"), ""),
            Variable("MUSTER_SUBJECT_PREFIX", (BusSettings, "subject_prefix"), "serve"),
            Variable(
                "MUSTER_STATE_DIR", "State directory of the embedded stack.", "`.muster` here or in a parent"
            ),
            Variable(
                "MUSTER_CONTEXT",
                "Context that names the stack, where none of these variables names one; see `muster context`.",
                "the context in use",
            ),
            Variable(
                "MUSTER_NATS_PORT",
                "Where compose publishes NATS, also when it is in `.env` beside `compose.yaml`.",
                "`127.0.0.1:4222`",
            ),
            Variable(
                "MUSTER_HTTP_PORT",
                "Where compose publishes HTTP, likewise, for URLs that are printed.",
                "8000",
            ),
            Variable("MUSTER_TLS", "Set where compose serves HTTPS, for URLs that are printed.", ""),
            Variable("MUSTER_DEBUG", "Anything: unexpected errors are printed with their traceback.", ""),
        ),
    ),
    Section(
        "Programs with handles",
        "Programs outside of replicas that call `get_deployment_handle`. They find the stack as `muster` does.",
        _read_nothing,
        (
            Variable(
                "MUSTER_CLIENT_CREDS_FILE", "File of NATS credentials, such as `secrets/client.creds`.", ""
            ),
            Variable("MUSTER_CLIENT_USER", "User of a NATS with plain users.", "client"),
            Variable(
                "MUSTER_CLIENT_PASSWORD", "Password of that user. Or `MUSTER_CLIENT_PASSWORD_FILE`.", ""
            ),
        ),
    ),
)

_COMPOSE_INTRO: Final = """\
Read by `compose.yaml`, from the shell or a file `.env` beside it. Each service has three limits of its own:
`MUSTER_<SERVICE>_MEMORY`, `_CPUS` (0 for all of the machine's) and `_PIDS` (threads), such as
`MUSTER_REPLICA_HOST_MEMORY=64g`.
"""

_COMPOSE: Final[Mapping[str, str]] = {
    "MUSTER_APPS": "Directory of the applications' code; replicas and proxies see it as `/apps`.",
    "MUSTER_REQUIREMENTS": "File of the packages that replicas need, below the directory of compose.yaml.",
    "MUSTER_SECRETS": "Directory of the secrets that `make secrets` has made.",
    "MUSTER_HTTP_PORT": "Published port, or address:port, of the ingress.",
    "MUSTER_TLS": "Directory with `tls.crt` and `tls.key`, for `deploy/ingress/tls.yaml`.",
    "MUSTER_CONSOLE_PORT": "Published port, or address:port, of the console.",
    "MUSTER_CONSOLE_ALLOWED_HOSTS": "As for the console, and likewise the next ones.",
    "MUSTER_CONSOLE_HTTPS": "Whether browsers reach the console by HTTPS.",
    "MUSTER_CONSOLE_HTTP_URL": "Base URL that the console's pages show for calls.",
    "MUSTER_CONSOLE_GRAFANA_URL": "Base URL of Grafana as browsers reach it.",
    "MUSTER_CONSOLE_TRACES_URL": "URL of a trace as browsers reach it.",
    "MUSTER_CONSOLE_APPS_DIR": "Directory of applications that a deploy in the console proposes.",
    "MUSTER_NATS_PORT": "Published port, or address:port, of NATS.",
    "MUSTER_PROMETHEUS_PORT": "Published port, or address:port, of Prometheus.",
    "MUSTER_ALERTMANAGER": "Directory with `alertmanager.yml`: where alerts go.",
    "MUSTER_ALERTMANAGER_PORT": "Published port, or address:port, of Alertmanager.",
    "MUSTER_GRAFANA_PORT": "Published port, or address:port, of Grafana.",
    "MUSTER_JAEGER_PORT": "Published port, or address:port, of Jaeger.",
    "MUSTER_PROMETHEUS_URL": "The Prometheus that the controllers read; empty for none.",
    "MUSTER_PROXY_PROCESSES": "Proxy processes in each proxy container.",
    "MUSTER_FORWARDED_HOPS": "Trusted load balancers in front, as for the proxy.",
    "MUSTER_NUM_CPUS": "CPUs that the replicas of each host may reserve; 0 for those of the machine, at least 8.",
    "MUSTER_TMP_SIZE": "Size of a replica host's `/tmp`, in memory.",
    "MUSTER_SHM_SIZE": "Size of a replica host's `/dev/shm`, Ray's object store.",
    "MUSTER_OTLP_ENDPOINT": "Address that traces are sent to; empty turns tracing off.",
    "MUSTER_OTLP_HEADERS": "Headers for it.",
    "MUSTER_TRACES_RESOURCE": "Attributes of every span.",
    "MUSTER_TRACES_RATIO": "Share of requests that are traced, 0 to 1.",
}
"""Variables of compose.yaml, besides each service's limits; services' own are passed on to them."""

INTERNAL: Final[Mapping[str, str]] = {
    "MUSTER_PROXY_PARENT_FD": "socket between a proxy's parent and its processes",
    "MUSTER_LOG_SOCKET": "socket that a replica's log lines go to",
    "MUSTER_STACK_ID": "mark of all processes of one `muster up`",
    "MUSTER_PROCESS": "mark of one of them",
    "MUSTER_STARTED_IN_BACKGROUND": "the stack was started by `muster start`",
    "MUSTER_PASSWORD_FILE": "password for the script that prepares Postgres",
}
"""Variables that Muster sets for its own processes."""

_HEAD: Final = f"""\
# Environment variables

{GENERATED}
Services read their settings once, when they start. An empty variable counts as unset; an invalid one ends the
process with an error that names it. A secret comes as `NAME`, or as `NAME_FILE`, the path of a file that holds it.
What can change while services run is [configuration](configuration.md).
"""


def page() -> str:
    """The page."""
    parts = [_HEAD]
    for section in SECTIONS:
        parts += [f"## {section.title}\n", *([f"{section.intro}\n"] if section.intro else []), _rows(section)]
    parts += [
        "## Containers\n",
        f"{_COMPOSE_INTRO}\n",
        table(("variable", "default", "meaning"), _compose_rows()),
        "## Set by Muster itself\n",
        "Not to be set by users: "
        + "; ".join(f"`{name}`, {what}" for name, what in INTERNAL.items())
        + ".\n",
    ]
    return "\n".join(parts)


def _rows(section: Section) -> str:
    reads = record(section)
    rows = []
    for variable in section.rows:
        read = reads.get(variable.name, Read("", ""))
        default = read.default if variable.default is None else variable.default
        rows.append((f"`{variable.name}`", default, read.range, _meaning(variable.meaning)))
    return table(("variable", "default", "range", "meaning"), rows)


def _meaning(meaning: str | tuple[type, str]) -> str:
    if isinstance(meaning, str):
        return meaning
    kind, field = meaning
    return field_docs(kind)[field].replace("`null`", "unset")


def _compose_rows() -> Iterable[tuple[str, ...]]:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"\$\{(MUSTER_[A-Z_]+)(?::?-([^}]*))?\}", text))
    return [(f"`{name}`", defaults.get(name, ""), meaning) for name, meaning in _COMPOSE.items()]
