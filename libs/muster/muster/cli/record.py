"""Commands that look back at changes: `muster history`, `muster revisions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from muster.cli import output
from muster.cli.asking import Question, asking
from muster.cli.session import Session
from muster.cli.tables import moment, print_table, styled, table
from serve_common.names import deployment_tag
from serve_common.wires.queries import GetHistory, GetRevisions
from serve_common.wires.views import HistoryView, RevisionView


@asking
def history(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SUBJECT", help="Only about this deployment, backend, endpoint or host."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="The newest so many.")] = 50,
    before: Annotated[
        int | None, typer.Option("--before", min=1, help="Only older than the entry with this id.")
    ] = None,
) -> Question[list[HistoryView]]:
    """Show what was changed, and who claimed to do it, the newest first.

    Examples:
      muster history digits
      muster history --json

    With --json each entry has the command, and what was before and after.
    Who it was is what the client says of itself; nobody has verified it.
    """
    query = GetHistory(limit=limit, subject=subject, before=before)

    def show(views: Sequence[HistoryView]) -> None:
        _show_history(views)
        if len(views) == limit:
            output.say(f"older ones: --before {views[-1].id}")

    return Question(lambda admin: admin.get_history(query), show)


@asking
def revisions(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a deployment or backend.")],
) -> Question[list[RevisionView]]:
    """Show what a deployment was, the newest first: where rollback can go.

    Example:
      muster revisions digits

    Failed ones are there too, and say so.
    """
    tag = deployment_tag(name)

    def show(views: Sequence[RevisionView]) -> None:
        _show_revisions(views)
        if len(views) > 1:
            output.say(f"'muster rollback {output.short_name(tag)} --to-revision N' goes back to one")

    return Question(lambda admin: admin.get_revisions(GetRevisions(name=tag)), show)


def _show_history(views: Sequence[HistoryView]) -> None:
    rows = table("id", "at", "claimed by", "verb", "subject", "goal")
    for view in views:
        rows.add_row(
            Text(str(view.id)),
            Text(moment(view.at)),
            Text(view.who or "-"),
            Text(view.verb),
            Text(output.short_name(view.subject)),
            Text(view.goal_id or "-"),
        )
    print_table("Changes", rows)


def _show_revisions(views: Sequence[RevisionView]) -> None:
    rows = table("revision", "at", "status", "version", "import path", "replicas", "route")
    for view in views:
        rows.add_row(
            Text(f"{view.revision}{' (now)' if view.is_current else ''}"),
            Text(moment(view.at)),
            styled(view.status.value),
            Text(view.version or "-"),
            Text(view.import_path),
            Text(str(view.num_replicas)),
            Text(view.route_prefix or "-"),
        )
    print_table("Revisions", rows)
