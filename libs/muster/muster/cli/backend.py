"""`muster backend …`: code and configuration with replicas, without an endpoint of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from muster.cli.changes import ChangeRequest, change_command
from muster.cli.config_options import (
    BACKEND_CHANGES,
    BACKEND_OPTIONS,
    CODE_OPTIONS,
    build_backend_config,
    build_replica_config,
    parse_backend_overrides,
)
from muster.cli.output import (
    counts,
    get_config_facts,
    print_facts,
    print_table,
    short_name,
    shorten,
    style_state,
    table,
)
from muster.cli.queries import ReadRequest, group, query_command
from muster.cli.session import Session
from serve_common.api.commands import Change, CreateBackend, DeleteBackend, UpdateBackendConfig
from serve_common.api.queries import GetBackendConfig
from serve_common.api.views import BackendConfigView, BackendView
from serve_common.names import deployment_tag

Tag = Annotated[str, typer.Argument(metavar="BACKEND", help="Tag of the backend, or name of a deployment.")]

app = group("Backends, code with its replicas: create, update, delete, config, list.")


@change_command(timeout_s=600.0, options=(*CODE_OPTIONS, *BACKEND_OPTIONS))
def create(
    session: Session,
    *,
    tag: Tag,
    import_path: Annotated[str, typer.Argument(help="Class or function to serve, as module:attribute.")],
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Create or update a backend, and wait until its replicas run.

    Example:
      muster backend create v2 digits:Digits --app-dir examples/digits

    Options that are left out get their defaults. No request reaches the
    backend until an endpoint sends to it: 'muster endpoint create',
    'muster traffic set'.
    """
    return _change_request(
        CreateBackend(
            backend_tag=deployment_tag(tag, "BACKEND"),
            replica_config=build_replica_config(import_path, overrides, session.directory),
            backend_config=build_backend_config(overrides, session.directory),
        ),
        tag,
        "is created",
    )


@change_command(timeout_s=600.0, options=BACKEND_CHANGES)
def update(
    session: Session,
    *,
    tag: Tag,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="JSON|@FILE", help="Fields to change, as an object; options override them."
        ),
    ] = None,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Change fields of the configuration of a backend or deployment.

    Examples:
      muster backend update digits --num-replicas 3
      muster backend update digits --config '{"max_replicas_per_host": null}'

    Fields that are not given stay as they are. No replica is replaced.
    """
    return _change_request(
        UpdateBackendConfig(
            backend_tag=deployment_tag(tag, "BACKEND"),
            config=parse_backend_overrides(overrides, config, session.directory),
        ),
        tag,
        "is updated",
    )


@change_command()
def delete(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    tag: Tag,
    force_kill: Annotated[
        bool, typer.Option("--force-kill", help="Kill replicas without finishing requests in flight.")
    ] = False,
) -> ChangeRequest:
    """Delete a backend and wait until its replicas are gone.

    Example:
      muster backend delete v1

    The command is refused while an endpoint sends or copies traffic to it.
    """
    request = DeleteBackend(backend_tag=deployment_tag(tag, "BACKEND"), force_kill=force_kill)
    return _change_request(request, tag, "is deleted", "does not exist")


@query_command
def config(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    tag: Tag,
) -> ReadRequest[BackendConfigView]:
    """Show a backend's configuration."""
    query = GetBackendConfig(backend_tag=deployment_tag(tag, "BACKEND"))
    return ReadRequest(lambda admin: admin.get_backend_config(query), _show_config)


@query_command
def list_(session: Session) -> ReadRequest[list[BackendView]]:  # noqa: ARG001 - every command gets it
    """List backends, those of deployments included."""
    return ReadRequest(lambda admin: admin.get_all_backends(), _show_backends)


def _change_request(
    command: Change, tag: str, done: str, already: str = "is already as given"
) -> ChangeRequest:
    what = f"backend {short_name(tag)}"
    return ChangeRequest(
        command=command, what=what, done=done, already=already, progress_command="muster backend list"
    )


def _show_config(view: BackendConfigView) -> None:
    facts = {"backend": short_name(view.backend_tag), "version": view.version or "(none)"}
    print_facts({**facts, **get_config_facts(view.backend_config, view.replica_config)})


def _show_backends(views: Sequence[BackendView]) -> None:
    rows = table("backend", "status", "replicas", "import path", "message")
    for view in views:
        rows.add_row(
            Text(short_name(view.backend_tag)),
            style_state(view.status.value),
            Text(counts(view.replicas, view.backend_config)),
            Text(view.replica_config.import_path),
            Text(shorten(view.message)),
        )
    print_table("Backends", rows)


app.command("create")(create)
app.command("update")(update)
app.command("delete")(delete)
app.command("config")(config)
app.command("list")(list_)
