"""`muster autoscaling …`: numbers of replicas that follow the load; see them, pause them, let them go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from muster.cli import output
from muster.cli.asking import Question, asking
from muster.cli.changing import changing
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from muster.cli.tables import print_table, table
from serve_common.names import deployment_tag
from serve_common.wires.commands import PauseAutoscaling, ResumeAutoscaling
from serve_common.wires.views import AutoscalingView

Name = Annotated[str, typer.Argument(metavar="NAME", help="deployment or app/deployment.")]

app = group("Numbers of replicas that follow the load: list, pause, resume.")


@asking
def list_(session: Session) -> Question[list[AutoscalingView]]:  # noqa: ARG001 - every command gets it
    """List what was seen, what it comes to, and why it moved or held."""
    return Question(lambda admin: admin.get_autoscaling(), show_autoscaling)


@changing()
def pause(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> Intent:
    """Leave a deployment's number of replicas as it is.

    Example:
      muster autoscaling pause digits

    It stays so over deploys, until 'muster autoscaling resume'.
    """
    tag = deployment_tag(name)
    return Intent(
        command=PauseAutoscaling(backend_tag=tag),
        what=output.short_name(tag),
        done="keeps its number of replicas",
        already="keeps its number of replicas already",
        look="muster autoscaling list",
    )


@changing()
def resume(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> Intent:
    """Let a deployment's number of replicas follow its load again.

    Example:
      muster autoscaling resume digits
    """
    tag = deployment_tag(name)
    return Intent(
        command=ResumeAutoscaling(backend_tag=tag),
        what=output.short_name(tag),
        done="follows its load again",
        already="follows its load already",
        look="muster autoscaling list",
    )


def show_autoscaling(views: Sequence[AutoscalingView]) -> None:
    """Each backend in a row."""
    rows = table("name", "replicas", "limits", "load", "wanted", "verdict", "why")
    for view in views:
        rows.add_row(
            Text(output.short_name(view.backend_tag)),
            Text(str(view.num_replicas)),
            Text(f"{view.min_replicas}-{view.max_replicas}"),
            Text("-" if view.seen is None else f"{view.seen:.1f}"),
            Text("-" if view.wanted is None else f"{view.wanted:.1f}"),
            Text("paused" if view.paused else view.verdict or "-", style="yellow" if _is_odd(view) else ""),
            Text(view.why),
        )
    print_table("Autoscaling", rows)


def _is_odd(view: AutoscalingView) -> bool:
    return bool(view.paused) or view.verdict == "held"


app.command("list")(list_)
app.command("pause")(pause)
app.command("resume")(resume)
