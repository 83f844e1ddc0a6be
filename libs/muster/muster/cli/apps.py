"""`muster app …`: several deployments as one, from one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from muster.cli import parsing
from muster.cli.app_history import history, rollback
from muster.cli.changes import ChangeRequest, change_command
from muster.cli.completion import complete_application
from muster.cli.help import Commands
from muster.cli.output import Cell, print_error, print_table, shorten, style_state, table
from muster.cli.queries import ReadRequest, query_command
from muster.cli.session import Session
from muster.cli.yaml_file import YamlFile, parse_path
from serve_common.api.commands import DeleteApplication, DeployApplication, DeploymentSpec
from serve_common.api.queries import GetAllApplications
from serve_common.api.views import ApplicationView
from serve_common.config.backend import (
    ReplicaConfig,
    check_backend_config,
    check_endpoint_options,
    check_replica_config,
)
from serve_common.errors import BadField
from serve_common.names import check_name, check_route


class FileText(msgspec.Struct, frozen=True):
    """A file that was read."""

    text: str
    named: str
    """The file, for people."""
    directory: Path
    """The directory that its relative paths are resolved in."""


def read_file(file: str, directory: Path, field: str) -> FileText:
    """Read ``file`` (``-``: standard input) of ``directory``. Raises `BadField`."""
    if file == "-":
        return FileText(sys.stdin.read(), "standard input", directory)
    path = directory / file
    return FileText(parsing.read_text(path, field), file, path.parent)


def parse_application(found: FileText) -> tuple[DeployApplication, list[str]]:
    """The command that a file describes, with directories as hosts see them, and notes.

    Everything is checked before anything is sent. Raises `BadField` with the file, the line and the path in it: the
    file is written by hand, and ``deployments[1].backend_config.num_replicas`` is the place to correct.
    """
    file = YamlFile(found.text, found.named)
    if not isinstance(file.value, dict):
        raise file.build_error((), "must have the fields of an application: name, deployments, ingress, ...")
    if "request_id" in file.value:
        raise file.build_error(("request_id",), "belongs to one run, not into a file")
    if file.value.get("skips_rollout"):
        raise file.build_error(("skips_rollout",), "belongs to one run, not into a file: use --no-rollout")
    request = file.convert(DeployApplication)
    try:
        return _check_application(request, found.directory)
    except BadField as error:
        raise file.build_error(parse_path(error.field), error.reason) from error


def _check_application(request: DeployApplication, base: Path) -> tuple[DeployApplication, list[str]]:
    check_name(request.name, "name")
    if request.route_prefix is not None:
        check_route(request.route_prefix, "route_prefix")
    notes: list[str] = []
    specs = [_spec(each, f"deployments[{at}]", base, notes) for at, each in enumerate(request.deployments)]
    names = [each.name for each in specs]
    check_unique(names, "deployments")
    if request.ingress not in names:
        there = ", ".join(names) or "none at all"
        raise BadField("ingress", f"{request.ingress[:80]!r} is none of the deployments; there are: {there}")
    return msgspec.structs.replace(request, deployments=specs), notes


def check_unique(names: Sequence[str], field: str) -> None:
    """Raise `BadField` with the index of the first name in the list ``field`` that is there twice."""
    for at, name in enumerate(names):
        if name in names[:at]:
            raise BadField(f"{field}[{at}].name", f"{name} is there twice")


def _spec(spec: DeploymentSpec, at: str, base: Path, notes: list[str]) -> DeploymentSpec:
    check_name(spec.name, f"{at}.name")
    check_backend_config(spec.backend_config, f"{at}.backend_config")
    check_endpoint_options(spec.endpoint_options, f"{at}.endpoint_options")
    code = check_code(spec.replica_config, f"{at}.replica_config", base, notes)
    return msgspec.structs.replace(spec, replica_config=code)


def check_code(config: ReplicaConfig, at: str, base: Path, notes: list[str]) -> ReplicaConfig:
    """The configuration with its directory as hosts see it; notes for people are added. Raises `BadField`."""
    check_replica_config(config, at)
    place, note = parsing.resolve_app_dir(config.app_dir or None, base, f"{at}.app_dir")
    if note and note not in notes:
        notes.append(note)
    return msgspec.structs.replace(config, app_dir=place)


app = Commands(help="Deploy several deployments as one application: deploy, delete, list, history, rollback.")


@change_command(timeout_s=600.0)
def deploy(
    session: Session,
    *,
    file: Annotated[
        str,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="File in YAML or JSON that describes the application; '-' reads standard input.",
        ),
    ],
    skips_rollout: Annotated[
        bool,
        typer.Option(
            "--no-rollout", help="Replace old versions at once although 'rollout' is set, as for a hotfix."
        ),
    ] = False,
) -> ChangeRequest:
    """Create or update an application from a file, and wait until it serves.

    Example:
      muster app deploy -f shop.yaml

    where shop.yaml reads:
      name: shop
      route_prefix: /shop
      ingress: front
      deployments:
        - name: front
          replica_config: {import_path: "shop:Front", app_dir: .}
        - name: model
          version: v1
          replica_config: {import_path: "shop:Model", app_dir: .}
          backend_config: {num_replicas: 2}

    The change is all or nothing; deployments that are left out are deleted. app_dir is relative to the file. All fields
    are named like the options of 'muster deploy', with underscores: beside 'name', version; under replica_config,
    import_path, app_dir, init_args, init_kwargs and ray_actor_options (with num_cpus and num_gpus); under
    endpoint_options, shard_key_header, backend_header, relative_slo_ms and error_format; under backend_config, all
    others. 'methods' stands beside route_prefix.
    """
    return build_app_change(read_file(file, session.directory, "--file"), skips_rollout=skips_rollout)


def build_app_change(found: FileText, *, skips_rollout: bool = False) -> ChangeRequest:
    """The change that a file describes. Raises `BadField`."""
    request, notes = parse_application(found)
    request = msgspec.structs.replace(request, skips_rollout=skips_rollout)
    for note in notes:
        print_error(note)
    return ChangeRequest(
        command=request,
        what=f"application {request.name}",
        done="is deployed",
        progress_command="muster app list",
    )


@change_command()
def delete(
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help="Name of the application.",
            autocompletion=complete_application,
        ),
    ],
) -> ChangeRequest:
    """Delete an application with all its deployments, and wait until their replicas are gone.

    Example:
      muster app delete shop

    Requests in flight have --graceful-shutdown-timeout-s (20 seconds by default) to finish. Deleting an application
    that does not exist succeeds.
    """
    return ChangeRequest(
        command=DeleteApplication(name=check_name(name, "APP")),
        what=f"application {name}",
        done="is deleted",
        already="does not exist",
        progress_command="muster app list",
    )


@query_command
def list_() -> ReadRequest[list[ApplicationView]]:
    """List applications."""
    return ReadRequest(GetAllApplications(), _show_applications)


def _show_applications(views: Sequence[ApplicationView]) -> None:
    rows = table("application", "status", "route", "ingress", "deployments", "message")
    for view in views:
        rows.add_row(
            Cell(view.name),
            style_state(view.status.value),
            Cell(view.route_prefix or "-"),
            Cell(view.ingress),
            Cell(", ".join(view.deployments)),
            Cell(shorten(view.message)),
        )
    print_table("Applications", rows)


app.command("deploy")(deploy)
app.command("delete")(delete)
app.command("list")(list_)
app.command("history")(history)
app.command("rollback")(rollback)
