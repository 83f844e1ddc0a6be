"""Commands that look at deployments: `muster list`, `muster info`, `muster snapshot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from muster.cli import output
from muster.cli.asking import Question, asking
from muster.cli.session import Session
from muster.cli.show_status import show_deployments, show_everything
from muster.cli.tables import moment, print_table, styled, table
from serve_common.names import deployment_tag
from serve_common.wires.queries import GetDeploymentInfo, ListDeployments
from serve_common.wires.views import DeploymentView, SnapshotView


@asking
def list_(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Also those that are gone, as far as they are remembered.")
    ] = False,
) -> Question[list[DeploymentView]]:
    """List deployments.

    Example:
      muster list --deleted

    'muster status' shows hosts and proxies too.
    """
    query = ListDeployments(include_deleted=deleted)
    return Question(lambda admin: admin.list_deployments(query), show_deployments)


@asking
def info(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="deployment or app/deployment.")],
) -> Question[DeploymentView]:
    """Show all that is known of one deployment: configuration, goal, replicas.

    Example:
      muster info digits

    'muster status digits' is the short form.
    """
    query = GetDeploymentInfo(name=deployment_tag(name))
    return Question(lambda admin: admin.get_deployment_info(query), show_everything)


@asking
def snapshot(session: Session) -> Question[list[SnapshotView]]:  # noqa: ARG001 - every command gets it
    """Every deployment in short, with its class and its start and end.

    Example:
      muster snapshot --json

    Those that are gone are there too, as far as they are remembered.
    """
    return Question(lambda admin: admin.get_snapshot(), _show_snapshot)


def _show_snapshot(views: Sequence[SnapshotView]) -> None:
    rows = table("name", "class", "version", "route", "status", "start", "end")
    for view in views:
        rows.add_row(
            Text(output.short_name(view.name)),
            Text(view.class_name),
            Text(view.version),
            Text(view.route or "-"),
            styled(view.status.value),
            Text(moment(view.start_time)),
            Text(moment(view.end_time)),
        )
    print_table("Deployments", rows)
