"""`muster app …`: several deployments as one, from one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from muster.cli import output
from muster.cli.app_file import read_application
from muster.cli.asking import Question, asking
from muster.cli.changing import changing
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from muster.cli.tables import print_table, styled, table
from serve_common.names import check_name
from serve_common.wires.commands import DeleteApplication
from serve_common.wires.views import ApplicationView

app = group("Several deployments as one: deploy, delete, list.")


@changing(timeout_s=600.0)
def deploy(
    session: Session,
    *,
    file: Annotated[
        str, typer.Option("-f", "--file", metavar="FILE", help="YAML or JSON; '-' reads standard input.")
    ],
) -> Intent:
    """Make an application be as in a file, and wait until it serves.

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

    All of it or nothing; deployments that are left out go away. app_dir
    is relative to the file. Other fields are as the options of
    'muster deploy' without their dashes.
    """
    request, notes = read_application(file, session.directory)
    for note in notes:
        output.complain(note)
    return Intent(
        command=request, what=f"application {request.name}", done="is deployed", look="muster app list"
    )


@changing()
def delete(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Annotated[str, typer.Argument(metavar="APP", help="Its name.")],
) -> Intent:
    """Delete an application with all its deployments.

    Example:
      muster app delete shop

    Requests in flight finish first.
    """
    return Intent(
        command=DeleteApplication(name=check_name(name, "APP")),
        what=f"application {name}",
        done="is deleted",
        already="does not exist",
        look="muster app list",
    )


@asking
def list_(session: Session) -> Question[list[ApplicationView]]:  # noqa: ARG001 - every command gets it
    """List applications."""
    return Question(lambda admin: admin.get_all_applications(), _show_applications)


def _show_applications(views: Sequence[ApplicationView]) -> None:
    rows = table("application", "status", "route", "ingress", "deployments", "message")
    for view in views:
        rows.add_row(
            Text(view.name),
            styled(view.status.value),
            Text(view.route_prefix or "-"),
            Text(view.ingress),
            Text(", ".join(view.deployments)),
            Text(output.brief(view.message)),
        )
    print_table("Applications", rows)


app.command("deploy")(deploy)
app.command("delete")(delete)
app.command("list")(list_)
