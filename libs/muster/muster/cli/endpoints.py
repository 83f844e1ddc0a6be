"""`muster endpoint …`, `muster traffic …`, `muster http …`: endpoints, traffic split and HTTP options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from muster.cli import parsing
from muster.cli.changes import ChangeRequest, change_command
from muster.cli.completion import complete_endpoint
from muster.cli.config_options import name_option
from muster.cli.endpoint_options import (
    ENDPOINT_CHANGES,
    ENDPOINT_OPTIONS,
    build_endpoint_options,
    parse_endpoint_overrides,
)
from muster.cli.help import Commands
from muster.cli.output import (
    Cell,
    format_methods,
    format_shares,
    format_value,
    get_facts,
    print_facts,
    print_table,
    table,
)
from muster.cli.queries import (
    DryRunOption,
    FieldsOption,
    NoWaitOption,
    ReadRequest,
    TimeoutOption,
    option,
    query_command,
    stack_command,
)
from muster.cli.reverts import run_revert
from muster.cli.session import Session, StackChoice
from muster.client.admin import AdminClient
from serve_common.api.commands import (
    CreateEndpoint,
    DeleteEndpoint,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
)
from serve_common.api.queries import GetAllEndpoints, GetHistory, GetHttpConfig
from serve_common.api.views import EndpointView
from serve_common.config.backend import EndpointOptions, HttpOptions, check_http_options, merged
from serve_common.errors import BadField, NotFound
from serve_common.names import check_route, deployment_tag, short_name

Name = Annotated[
    str,
    typer.Argument(
        metavar="ENDPOINT",
        help="Name of the endpoint; that of a deployment has the deployment's name.",
        autocompletion=complete_endpoint,
    ),
]
Weights = Annotated[
    list[str],
    typer.Argument(
        metavar="BACKEND=WEIGHT...",
        help="Share of the requests for each backend, 0 to 1 and 1 in all; BACKEND alone gets all.",
    ),
]

endpoint_app = Commands(
    help="""Manage endpoints, which send requests to backends: show, create, update, delete, list.

    A deployment is a backend and an endpoint of the same name that sends everything to it. Create an endpoint only to
    send requests to backends that belong to no deployment.
    """
)


@change_command(options=ENDPOINT_OPTIONS)
def create_endpoint(
    *,
    name: Name,
    weights: Weights,
    route_prefix: Annotated[
        str | None,
        typer.Option(
            "--route-prefix",
            metavar="PATH",
            help="HTTP path prefix, such as /digits. Default: none; it is called over NATS only.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="METHOD,...", help="Accepted HTTP methods. Default: GET,POST."),
    ] = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Create an endpoint, and wait until every proxy routes it.

    Example:
      muster endpoint create trial digits=0.5 digits-new=0.5 --route-prefix /trial

    The backends must exist: 'muster backend create'. An endpoint that exists with another route, methods, traffic or
    options is not changed: the command is refused.
    """
    tag = deployment_tag(name, "ENDPOINT")
    request = CreateEndpoint(
        endpoint=tag,
        traffic=parsing.parse_shares(weights, "BACKEND=WEIGHT"),
        route=None if route_prefix is None else check_route(route_prefix, "--route-prefix"),
        options=build_endpoint_options(overrides),
        **parsing.read_methods(methods),
    )
    what = f"endpoint {short_name(tag)}"
    return ChangeRequest(
        command=request, what=what, done="is created", progress_command="muster endpoint list"
    )


@change_command(options=ENDPOINT_CHANGES)
def update_endpoint(
    session: Session,
    *,
    name: Name,
    fields: FieldsOption = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Change options of an endpoint while it serves, and wait for every proxy.

    Examples:
      muster endpoint update digits --shard-key-header X-User
      muster endpoint update digits --fields '{"relative_slo_ms": null}'

    Options that are not given stay as they are. The next deploy of a deployment sets them again. Route and methods
    cannot be changed. No replica is touched.
    """
    tag = deployment_tag(name, "ENDPOINT")
    return ChangeRequest(
        command=SetEndpointOptions(
            endpoint=tag, options=parse_endpoint_overrides(overrides, fields, session.directory)
        ),
        what=f"options of {short_name(tag)}",
        done="are changed",
        already="are already as given",
        progress_command="muster endpoint list",
    )


@change_command()
def delete_endpoint(*, name: Name) -> ChangeRequest:
    """Delete an endpoint, and wait for every proxy; its backends stay.

    Example:
      muster endpoint delete trial

    Refused for a deployment's endpoint: 'muster delete'. Deleting an endpoint that does not exist succeeds.
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
def list_endpoints() -> ReadRequest[list[EndpointView]]:
    """List endpoints with their routes and traffic."""
    return ReadRequest(GetAllEndpoints(), _show_endpoints)


def _show_endpoints(views: Sequence[EndpointView]) -> None:
    rows = table("endpoint", "route", "methods", "traffic", "shadows", "options")
    for view in views:
        rows.add_row(
            Cell(short_name(view.endpoint_tag)),
            Cell(view.route or "-"),
            Cell(format_methods(view.methods)),
            Cell(format_shares(view.traffic)),
            Cell(format_shares(view.shadows)),
            Cell(_options(view.options)),
        )
    print_table("Endpoints", rows)


def _options(options: EndpointOptions) -> str:
    """The options that differ from their defaults, as text."""
    default, values = msgspec.to_builtins(EndpointOptions()), msgspec.to_builtins(options)
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != default[name]) or "-"


@query_command
def show_endpoint(*, name: Name) -> ReadRequest[EndpointView]:
    """Show one endpoint: its route, methods, traffic, shadows and options.

    Example:
      muster endpoint show digits
    """
    tag = deployment_tag(name, "ENDPOINT")
    return ReadRequest(lambda admin: _fetch_endpoint(admin, tag), _show_endpoint)


async def _fetch_endpoint(admin: AdminClient, tag: str) -> EndpointView:
    for view in await admin.call(GetAllEndpoints()):
        if view.endpoint_tag == tag:
            return view
    raise NotFound(f"there is no endpoint {short_name(tag)!r}; 'muster endpoint list' lists all")


def _show_endpoint(view: EndpointView) -> None:
    print_facts(
        {
            "endpoint": short_name(view.endpoint_tag),
            "route": view.route or "none; called over NATS only",
            "methods": format_methods(view.methods),
            "traffic": format_shares(view.traffic),
            "shadows": format_shares(view.shadows),
            **get_facts(view.options),
        }
    )


endpoint_app.command("show")(show_endpoint)
endpoint_app.command("create")(create_endpoint)
endpoint_app.command("update")(update_endpoint)
endpoint_app.command("delete")(delete_endpoint)
endpoint_app.command("list")(list_endpoints)


traffic_app = Commands(
    help="""Split or copy the requests of an endpoint (canary, shadow): rollback, set, shadow.

    Try new code on a tenth of the requests of the deployment 'digits', whose backend and endpoint have its name:
      muster backend create digits-new digits:Digits --app-dir new/digits
      muster traffic set digits digits=0.9 digits-new=0.1

    Then end the trial:
      muster traffic set digits digits
      muster backend delete digits-new

    To keep the new code, deploy it as 'digits' instead of the first of these two: a deploy sends all requests to the
    deployment's own backend again.
    """
)


@change_command()
def set_traffic(
    *,
    name: Name,
    weights: Weights,
) -> ChangeRequest:
    """Set which share of an endpoint's requests each backend gets, and wait for every proxy.

    Examples:
      muster traffic set digits digits=0.9 digits-new=0.1
      muster traffic set digits digits

    The weights replace all earlier ones; backends left out get no requests. A deploy of the deployment 'digits' sends
    everything to it again.
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
    *,
    name: Name,
    backend: Annotated[
        str,
        typer.Argument(metavar="BACKEND", help="Backend that gets the copies; its responses are dropped."),
    ],
    proportion: Annotated[
        float,
        typer.Argument(metavar="SHARE", help="Share of the requests to copy, 0 to 1; 0 ends the copying."),
    ],
) -> ChangeRequest:
    """Copy a share of an endpoint's requests to a shadow backend, and wait for every proxy.

    Examples:
      muster traffic shadow digits digits-new 0.1
      muster traffic shadow digits digits-new 0

    Callers are not affected: the responses and errors of the shadow backend are dropped.
    """
    tag, copied_to = deployment_tag(name, "ENDPOINT"), deployment_tag(backend, "BACKEND")
    share = parsing.parse_share(proportion, "SHARE")
    return ChangeRequest(
        command=ShadowTraffic(endpoint=tag, backend_tag=copied_to, proportion=share),
        what=f"shadow traffic of {short_name(tag)} to {short_name(copied_to)}",
        done="is set" if share else "is ended",
        progress_command="muster endpoint list",
    )


@stack_command
def roll_back_traffic(
    session: Session,
    choice: StackChoice,
    *,
    name: Name,
    timeout_s: TimeoutOption = 120.0,
    no_wait: NoWaitOption = False,
    dry_run: DryRunOption = False,
    as_json: bool = False,
) -> None:
    """Return an endpoint's traffic to what it was before the last 'muster traffic set'.

    Example:
      muster traffic rollback digits

    Run again, it undoes that. A split that names a backend that is gone is refused.
    """
    run_revert(
        session,
        choice,
        f"traffic of {name}",
        lambda admin: _build_former_traffic(admin, deployment_tag(name, "ENDPOINT")),
        timeout_s=timeout_s,
        no_wait=no_wait,
        dry_run=dry_run,
        as_json=as_json,
    )


async def _build_former_traffic(admin: AdminClient, tag: str) -> ChangeRequest:
    present = (await _fetch_endpoint(admin, tag)).traffic
    for entry in await admin.call(GetHistory(limit=_ENTRIES_MAX, subject=tag)):
        if entry.verb != SetTraffic.verb or entry.subject != tag:
            continue
        try:
            changed = msgspec.convert(entry.old, dict[str, Any])
            former = msgspec.convert(changed.get(f"endpoint {tag}"), _FormerTraffic).traffic
        except msgspec.ValidationError:
            continue  # of a version that had other fields
        if former != present:
            return ChangeRequest(
                command=SetTraffic(endpoint=tag, weights=former),
                what=f"traffic of {short_name(tag)}",
                done=f"is back at {format_shares(former)}",
                progress_command="muster endpoint list",
            )
    raise NotFound(
        f"the traffic of {short_name(tag)} was never set otherwise; 'muster history {short_name(tag)}'"
    )


class _FormerTraffic(msgspec.Struct):
    """An endpoint's configuration as the audit log has it, as far as it is needed."""

    traffic: dict[str, float]


_ENTRIES_MAX: Final = 200
"""Newest changes of an endpoint that are looked at."""

traffic_app.command("rollback")(roll_back_traffic)
traffic_app.command("set")(set_traffic)
traffic_app.command("shadow")(shadow_traffic)


http_app = Commands(help="Show and change the HTTP options of all proxies: show, update.")


@query_command
def show_http_options() -> ReadRequest[HttpOptions]:
    """Show the HTTP options of all proxies."""
    return ReadRequest(GetHttpConfig(), _show_http_options)


_FIELDS: Final = (
    (
        "request_timeout_s",
        float,
        "Seconds from a request's arrival to the start of its response, 0.1 to 86400.",
        "SECONDS",
    ),
    ("body_bytes_max", int, "Largest accepted request body, in bytes.", "BYTES"),
    (
        "header_timeout_s",
        float,
        "Seconds for a client to send the head of a request, 0.1 to 3600.",
        "SECONDS",
    ),
    (
        "body_rate_min",
        int,
        "Bytes per second that a client must send or receive, over ten seconds; 0 disables it.",
        "BYTES",
    ),
    (
        "keep_alive_timeout_s",
        float,
        "Seconds that a connection may be idle between requests, 0.1 to 3600.",
        "SECONDS",
    ),
    (
        "middlewares",
        list[str],
        (
            "aiohttp middleware (an async function of request and handler) that every proxy imports, without a "
            "restart. Repeat the option for more, the outermost first; they replace all others. '' removes all."
        ),
        "MODULE:ATTRIBUTE",
    ),
    ("access_log", bool, "Log one line for each HTTP request.", None),
    ("root_path", str, "Path that a load balancer in front removes, for applications; '' for none.", "PATH"),
)
"""Options for the fields of `HttpOptions`: name, type, help text, metavar."""
HTTP_CHANGES: Final = tuple(
    option(name, kind, text, metavar=metavar) for name, kind, text, metavar in _FIELDS
)


@change_command(options=HTTP_CHANGES)
def update_http_options(
    *,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Change HTTP options of all proxies while they run, and wait for every proxy.

    Example:
      muster http update --request-timeout-s 30

    Options that are not given stay as they are; 'muster http show' prints the present values.
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
http_app.command("update")(update_http_options)
