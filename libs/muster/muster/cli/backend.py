"""`muster backend …` and `muster update`: code and configuration with replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from muster.cli.changes import ChangeRequest, change_command
from muster.cli.completion import complete_backend
from muster.cli.config_options import (
    BACKEND_CHANGES,
    BACKEND_OPTIONS,
    CODE_OPTIONS,
    build_backend_config,
    build_replica_config,
    parse_backend_overrides,
)
from muster.cli.help import Commands
from muster.cli.output import (
    Cell,
    counts,
    get_config_facts,
    print_facts,
    print_table,
    shorten,
    style_state,
    table,
)
from muster.cli.queries import FieldsOption, ReadRequest, ShowEnvOption, query_command
from muster.cli.session import Session
from serve_common.api.commands import ChangeReply, Command, CreateBackend, DeleteBackend, UpdateBackendConfig
from serve_common.api.queries import GetAllBackends, GetBackendConfig
from serve_common.api.views import BackendConfigView, BackendView
from serve_common.names import deployment_tag, short_name

Tag = Annotated[
    str,
    typer.Argument(
        metavar="BACKEND",
        help="Name of the backend; that of a deployment has the deployment's name.",
        autocompletion=complete_backend,
    ),
]

app = Commands(
    help="""Manage backends, which are code with replicas but no route: create, delete, show, list.

    A deployment is a backend and an endpoint of the same name that sends everything to it. Further backends are for
    several versions at a time, and get requests by 'muster traffic' or 'muster endpoint'.
    """
)


@change_command(timeout_s=600.0, options=(*CODE_OPTIONS, *BACKEND_OPTIONS))
def create(
    session: Session,
    *,
    tag: Annotated[
        str, typer.Argument(metavar="BACKEND", help="Name of the backend; no deployment may have it.")
    ],
    import_path: Annotated[
        str, typer.Argument(metavar="IMPORT_PATH", help="Class or function to serve, as module:attribute.")
    ],
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Create or update a backend, and wait until its replicas run.

    Example:
      muster backend create digits-new digits:Digits --app-dir examples/digits

    Options that are left out get their defaults. No request reaches the backend until an endpoint sends to it:
    'muster traffic set', 'muster endpoint create'.
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
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the deployment or backend, or APP/NAME.",
            autocompletion=complete_backend,
        ),
    ],
    fields: FieldsOption = None,
    skips_rollout: Annotated[
        bool, typer.Option("--no-rollout", help="Reconfigure all replicas at once although 'rollout' is set.")
    ] = False,
    overrides: Mapping[str, Any],
) -> ChangeRequest:
    """Change settings of a deployment or backend without replacing replicas.

    Examples:
      muster update digits --max-concurrent-queries 20
      muster update digits --fields '{"max_replicas_per_host": null}'

    Settings that are not given stay as they are. The next deploy of a deployment sets all of them again.
    """
    return _change_request(
        UpdateBackendConfig(
            backend_tag=deployment_tag(name, "NAME"),
            config=parse_backend_overrides(overrides, fields, session.directory),
            skips_rollout=skips_rollout,
        ),
        name,
        "is updated",
    )


@change_command()
def delete(
    *,
    tag: Tag,
    force_kill: Annotated[
        bool,
        typer.Option("--force-kill", help="Kill replicas at once, without finishing requests in flight."),
    ] = False,
) -> ChangeRequest:
    """Delete a backend, and wait until its replicas are gone.

    Example:
      muster backend delete digits-new

    Refused while an endpoint sends or copies requests to it, and for a deployment's backend: 'muster delete'.
    Deleting a backend that does not exist succeeds.
    """
    request = DeleteBackend(backend_tag=deployment_tag(tag, "BACKEND"), force_kill=force_kill)
    return _change_request(request, tag, "is deleted", "does not exist")


@query_command
def show(*, tag: Tag, show_env: ShowEnvOption = False) -> ReadRequest[BackendConfigView]:
    """Show the configuration of a backend or deployment."""
    query = GetBackendConfig(backend_tag=deployment_tag(tag, "BACKEND"))
    return ReadRequest(query, _show_config, shows_secrets=show_env)


@query_command
def list_() -> ReadRequest[list[BackendView]]:
    """List backends, those of deployments included."""
    return ReadRequest(GetAllBackends(), _show_backends)


def _change_request(
    command: Command[ChangeReply], tag: str, done: str, already: str = "is already as given"
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
            Cell(short_name(view.backend_tag)),
            style_state(view.status.value),
            Cell(counts(view.replicas, view.backend_config)),
            Cell(view.replica_config.import_path),
            Cell(shorten(view.message)),
        )
    print_table("Backends", rows)


app.command("create")(create)
app.command("delete")(delete)
app.command("show")(show)
app.command("list")(list_)
