"""`muster deploy`: options in, a deployment that serves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from muster.cli import output, values_given
from muster.cli.changing import changing
from muster.cli.config_options import BACKEND_OPTIONS, CODE_OPTIONS, backend_config_of, replica_config_of
from muster.cli.endpoint_options import ENDPOINT_OPTIONS, endpoint_options_of
from muster.cli.intent import Intent
from muster.cli.session import Session
from serve_common.names import check_route, deployment_tag
from serve_common.wires.commands import Deploy


@changing(timeout_s=600.0, options=(*CODE_OPTIONS, *BACKEND_OPTIONS, *ENDPOINT_OPTIONS))
def deploy(
    session: Session,
    *,
    import_path: Annotated[str, typer.Argument(help="module:attribute of a class or function.")],
    name: Annotated[str, typer.Option("--name", help="Its name.")],
    app: Annotated[str | None, typer.Option("--app", help="Its application; 'default' unless given.")] = None,
    route_prefix: Annotated[
        str | None, typer.Option("--route-prefix", help="Where HTTP reaches it, such as /digits.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="GET,POST", help="HTTP methods; all unless given."),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", help="Of the code. The same again keeps replicas; none given replaces them."
        ),
    ] = None,
    prev_version: Annotated[
        str | None, typer.Option("--prev-version", help="Refuse unless this is the version deployed now.")
    ] = None,
    given: Mapping[str, Any],
) -> Intent:
    """Make a deployment be as given, and wait until it serves.

    Examples:
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits --num-replicas 3 --version 2 \\
        --user-config '{"threshold": 0.9}'

    What is not given gets its default again: a deploy says everything.
    When the new version cannot start, the one before it keeps serving.
    """
    tag = deployment_tag(f"{app}/{name}" if app is not None else name, "--name")
    request = Deploy(
        name=tag,
        replica_config=replica_config_of(import_path, given, session.directory),
        backend_config=backend_config_of(given, session.directory),
        route_prefix=None if route_prefix is None else check_route(route_prefix, "--route-prefix"),
        endpoint_options=endpoint_options_of(given),
        version=version,
        prev_version=prev_version,
        **values_given.read_methods(methods),
    )
    return intent_to_deploy(request)


def intent_to_deploy(request: Deploy) -> Intent:
    """A deploy and its words."""
    what = output.short_name(request.name)
    return Intent(
        command=request, what=what, done="is deployed", look=f"muster status {what}", deployment=request.name
    )
