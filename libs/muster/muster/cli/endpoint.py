"""`muster endpoint …`: names and routes that traffic is sent to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from muster.cli import output, values_given
from muster.cli.asking import Question, asking
from muster.cli.changing import changing
from muster.cli.endpoint_options import (
    ENDPOINT_CHANGES,
    ENDPOINT_OPTIONS,
    endpoint_options_of,
    partial_endpoint_options,
)
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from muster.cli.tables import methods_text, print_table, shares, table
from serve_common.names import check_route, deployment_tag
from serve_common.values.endpoint_options import EndpointOptions
from serve_common.wires.commands import CreateEndpoint, DeleteEndpoint, SetEndpointOptions
from serve_common.wires.views import EndpointView

Name = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Its name; of a deployment the deployment's.")]
Weights = Annotated[
    list[str],
    typer.Argument(metavar="BACKEND=WEIGHT...", help="The weights' sum must be 1; BACKEND alone is all."),
]

app = group("Names and routes that requests go to: create, options, delete, list.")


@changing(options=ENDPOINT_OPTIONS)
def create(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    weights: Weights,
    route: Annotated[
        str | None,
        typer.Option("--route", help="Where HTTP reaches it, such as /digits; over NATS only unless given."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="GET,POST", help="HTTP methods; GET,POST unless given."),
    ] = None,
    given: Mapping[str, Any],
) -> Intent:
    """Make an endpoint, and wait until every proxy knows it.

    Example:
      muster endpoint create digits v1=0.9 v2=0.1 --route /digits

    The backends must exist: 'muster backend create'.
    """
    tag = deployment_tag(name, "ENDPOINT")
    request = CreateEndpoint(
        endpoint=tag,
        traffic=values_given.read_shares(weights, "BACKEND=WEIGHT"),
        route=None if route is None else check_route(route, "--route"),
        options=endpoint_options_of(given),
        **values_given.read_methods(methods),
    )
    what = f"endpoint {output.short_name(tag)}"
    return Intent(command=request, what=what, done="is created", look="muster endpoint list")


@changing(options=ENDPOINT_CHANGES)
def options_(
    session: Session,
    *,
    name: Name,
    options: Annotated[
        str | None,
        typer.Option("--options", metavar="JSON|@FILE", help="Fields as an object; options go over them."),
    ] = None,
    given: Mapping[str, Any],
) -> Intent:
    """Change how an endpoint tells its requests apart, while it serves.

    Examples:
      muster endpoint options digits --shard-key-header X-User
      muster endpoint options digits --options '{"relative_slo_ms": null}'

    What is not given stays as it is. Of a deployment, its next deploy
    says them anew. No replica is touched.
    """
    tag = deployment_tag(name, "ENDPOINT")
    return Intent(
        command=SetEndpointOptions(
            endpoint=tag, options=partial_endpoint_options(given, options, session.directory)
        ),
        what=f"options of {output.short_name(tag)}",
        done="are changed",
        already="are already as given",
        look="muster endpoint list",
    )


@changing()
def delete(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> Intent:
    """Delete an endpoint; its backends stay.

    Example:
      muster endpoint delete digits

    Deleting what does not exist is a success.
    """
    tag = deployment_tag(name, "ENDPOINT")
    return Intent(
        command=DeleteEndpoint(endpoint=tag),
        what=f"endpoint {output.short_name(tag)}",
        done="is deleted",
        already="does not exist",
        look="muster endpoint list",
    )


@asking
def list_(session: Session) -> Question[list[EndpointView]]:  # noqa: ARG001 - every command gets it
    """List endpoints with their routes and traffic."""
    return Question(lambda admin: admin.get_all_endpoints(), _show_endpoints)


def _show_endpoints(views: Sequence[EndpointView]) -> None:
    rows = table("endpoint", "route", "methods", "traffic", "shadows", "options")
    for view in views:
        rows.add_row(
            Text(output.short_name(view.endpoint_tag)),
            Text(view.route or "-"),
            Text(methods_text(view.methods)),
            Text(shares(view.traffic)),
            Text(shares(view.shadows)),
            Text(_options(view.options)),
        )
    print_table("Endpoints", rows)


def _options(options: EndpointOptions) -> str:
    """Those that are not the default."""
    default, given = EndpointOptions(), msgspec.structs.asdict(options)
    return (
        ", ".join(f"{name}={value}" for name, value in given.items() if value != getattr(default, name))
        or "-"
    )


app.command("create")(create)
app.command("options")(options_)
app.command("delete")(delete)
app.command("list")(list_)
