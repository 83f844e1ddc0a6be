"""`muster endpoint …`, `muster traffic …`, `muster http …`: endpoints, traffic split and HTTP options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.text import Text

from muster.cli import parsing
from muster.cli.changes import ChangeRequest, change_command
from muster.cli.config_options import (
    ENDPOINT_CHANGES,
    ENDPOINT_OPTIONS,
    build_endpoint_options,
    name_option,
    parse_endpoint_overrides,
)
from muster.cli.output import (
    format_methods,
    format_shares,
    format_value,
    print_facts,
    print_table,
    short_name,
    table,
)
from muster.cli.queries import ReadRequest, group, option, query_command
from muster.cli.session import Session
from serve_common.api.commands import (
    CreateEndpoint,
    DeleteEndpoint,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.api.views import EndpointView
from serve_common.config.backend import merged
from serve_common.config.endpoint import EndpointOptions, HttpOptions, check_http_options
from serve_common.errors import BadField
from serve_common.names import check_route, deployment_tag

Name = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Name of the endpoint, or of its deployment.")]
Weights = Annotated[
    list[str],
    typer.Argument(
        metavar="BACKEND=WEIGHT...",
        help="Share of the requests for each backend, summing to 1; BACKEND alone has weight 1.",
    ),
]

endpoint_app = group("Endpoints with routes and options: create, options, delete, list.")


@change_command(options=ENDPOINT_OPTIONS)
def create_endpoint(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    weights: Weights,
    route: Annotated[
        str | None,
        typer.Option("--route", help="HTTP path prefix, such as /digits. Default: no route, NATS only."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="GET,POST", help="Accepted HTTP methods. Default: GET,POST."),
    ] = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Create an endpoint, and wait until every proxy routes it.

    Example:
      muster endpoint create digits v1=0.9 v2=0.1 --route /digits

    The backends must exist: 'muster backend create'.
    """
    tag = deployment_tag(name, "ENDPOINT")
    request = CreateEndpoint(
        endpoint=tag,
        traffic=parsing.parse_shares(weights, "BACKEND=WEIGHT"),
        route=None if route is None else check_route(route, "--route"),
        options=build_endpoint_options(overrides),
        **parsing.read_methods(methods),
    )
    what = f"endpoint {short_name(tag)}"
    return ChangeRequest(
        command=request, what=what, done="is created", progress_command="muster endpoint list"
    )


@change_command(options=ENDPOINT_CHANGES)
def endpoint_options(
    session: Session,
    *,
    name: Name,
    options: Annotated[
        str | None,
        typer.Option(
            "--options", metavar="JSON|@FILE", help="Fields to change, as an object; options override them."
        ),
    ] = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Change the options of an endpoint while it serves.

    Examples:
      muster endpoint options digits --shard-key-header X-User
      muster endpoint options digits --options '{"relative_slo_ms": null}'

    Options that are not given stay as they are. The next deploy of a
    deployment sets them anew. No replica is touched.
    """
    tag = deployment_tag(name, "ENDPOINT")
    return ChangeRequest(
        command=SetEndpointOptions(
            endpoint=tag, options=parse_endpoint_overrides(overrides, options, session.directory)
        ),
        what=f"options of {short_name(tag)}",
        done="are changed",
        already="are already as given",
        progress_command="muster endpoint list",
    )


@change_command()
def delete_endpoint(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> ChangeRequest:
    """Delete an endpoint; its backends stay.

    Example:
      muster endpoint delete digits

    Deleting an endpoint that does not exist succeeds.
    """
    tag = deployment_tag(name, "ENDPOINT")
    return ChangeRequest(
        command=DeleteEndpoint(endpoint=tag),
        what=f"endpoint {short_name(tag)}",
        done="is deleted",
        already="does not exist",
        progress_command="muster endpoint list",
    )


@query_command
def list_endpoints(session: Session) -> ReadRequest[list[EndpointView]]:  # noqa: ARG001 - every command gets it
    """List endpoints with their routes and traffic."""
    return ReadRequest(lambda admin: admin.get_all_endpoints(), _show_endpoints)


def _show_endpoints(views: Sequence[EndpointView]) -> None:
    rows = table("endpoint", "route", "methods", "traffic", "shadows", "options")
    for view in views:
        rows.add_row(
            Text(short_name(view.endpoint_tag)),
            Text(view.route or "-"),
            Text(format_methods(view.methods)),
            Text(format_shares(view.traffic)),
            Text(format_shares(view.shadows)),
            Text(_options(view.options)),
        )
    print_table("Endpoints", rows)


def _options(options: EndpointOptions) -> str:
    """The options that differ from their defaults, as text."""
    default, values = EndpointOptions(), msgspec.structs.asdict(options)
    return (
        ", ".join(f"{name}={value}" for name, value in values.items() if value != getattr(default, name))
        or "-"
    )


endpoint_app.command("create")(create_endpoint)
endpoint_app.command("options")(endpoint_options)
endpoint_app.command("delete")(delete_endpoint)
endpoint_app.command("list")(list_endpoints)


traffic_app = group("Traffic split of an endpoint over its backends: set, shadow.")


@change_command()
def set_traffic(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    weights: Weights,
) -> ChangeRequest:
    """Set the traffic split of an endpoint, and wait for every proxy.

    Examples:
      muster traffic set digits v1=0.9 v2=0.1
      muster traffic set digits v2

    The weights replace all earlier ones; backends left out get no requests.
    """
    tag = deployment_tag(name, "ENDPOINT")
    read = parsing.parse_shares(weights, "BACKEND=WEIGHT")
    return ChangeRequest(
        command=SetTraffic(endpoint=tag, weights=read),
        what=f"traffic of {short_name(tag)}",
        done="is set",
        progress_command="muster endpoint list",
    )


@change_command()
def shadow_traffic(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    backend: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="Backend that gets the copies; its responses are dropped."),
    ],
    proportion: Annotated[
        float,
        typer.Argument(metavar="PROPORTION", help="Share of requests to copy, 0 to 1; 0 ends copying."),
    ],
) -> ChangeRequest:
    """Copy a share of an endpoint's requests to a shadow backend.

    Examples:
      muster traffic shadow digits v2 0.1
      muster traffic shadow digits v2 0

    Callers are not affected: its responses and errors are dropped.
    """
    tag, copied_to = deployment_tag(name, "ENDPOINT"), deployment_tag(backend, "BACKEND")
    share = parsing.parse_share(proportion, "PROPORTION")
    return ChangeRequest(
        command=ShadowTraffic(endpoint=tag, backend_tag=copied_to, proportion=share),
        what=f"shadow traffic of {short_name(tag)} to {short_name(copied_to)}",
        done="is set" if share else "is ended",
        progress_command="muster endpoint list",
    )


traffic_app.command("set")(set_traffic)
traffic_app.command("shadow")(shadow_traffic)


http_app = group("HTTP options of all proxies: show, set.")


@query_command
def show_http_options(session: Session) -> ReadRequest[HttpOptions]:  # noqa: ARG001 - every command gets it
    """Show the options of all proxies."""
    return ReadRequest(lambda admin: admin.get_http_config(), _show_http_options)


_FIELDS: Final = (
    ("request_timeout_s", float, "Seconds from a request's arrival to the start of its response.", "S"),
    ("body_bytes_max", int, "Largest accepted request body, in bytes.", "N"),
    ("header_timeout_s", float, "Seconds for a client to send the head of a request.", "S"),
    ("body_rate_min", int, "Bytes per second that a client must send or receive; 0 disables it.", "N"),
    ("keep_alive_timeout_s", float, "Seconds that a connection may be idle between requests.", "S"),
    (
        "middlewares",
        list[str],
        "Middleware; may be repeated, the outermost first; '' alone removes all.",
        "MODULE:ATTRIBUTE",
    ),
    ("access_log", bool, "Log one line for each HTTP request.", None),
)
"""Options for the fields of `HttpOptions`: name, type, help text, metavar."""
HTTP_CHANGES: Final = tuple(
    option(name, kind, text, metavar=metavar) for name, kind, text, metavar in _FIELDS
)


@change_command(options=HTTP_CHANGES)
def set_http_options(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Change options of all proxies while they run.

    Example:
      muster http set --request-timeout-s 30

    Options that are not given stay as they are.
    """
    partial = {name: value for name, value in overrides.items() if value != []}
    if partial.get("middlewares") == [""]:
        partial["middlewares"] = []
    if not partial:
        raise BadField("options", "nothing is given; --help shows them")
    try:
        check_http_options(merged(HttpOptions(), partial, "options"))
    except BadField as error:
        raise name_option(error, "options") from error
    return ChangeRequest(
        command=SetHttpOptions(options=partial),
        what="options of all proxies",
        done="are changed",
        already="are already as given",
        progress_command="muster http show",
    )


def _show_http_options(options: HttpOptions) -> None:
    print_facts({name: format_value(value) for name, value in msgspec.structs.asdict(options).items()})


http_app.command("show")(show_http_options)
http_app.command("set")(set_http_options)
