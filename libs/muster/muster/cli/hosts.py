"""`muster host …`: the processes that run replicas."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.asking import Question, asking
from muster.cli.changing import changing
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from muster.cli.show_status import show_hosts
from serve_common.names import check_name
from serve_common.wires.commands import DrainHost, UndrainHost
from serve_common.wires.views import HostView

Host = Annotated[str, typer.Argument(metavar="HOST", help="Its id; see 'muster host list'.")]

app = group("Hosts, which run replicas: list, drain, undrain.")


@asking
def list_(session: Session) -> Question[list[HostView]]:  # noqa: ARG001 - every command gets it
    """List hosts with what they have and how many replicas they run."""
    return Question(lambda admin: admin.get_hosts(), show_hosts)


@changing(timeout_s=600.0)
def drain(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    host_id: Host,
) -> Intent:
    """Move every replica off a host, and wait until it runs none.

    Example:
      muster host drain host-1

    New replicas serve elsewhere before the old ones stop. Nothing is
    placed there again until 'muster host undrain'.
    """
    command = DrainHost(host_id=check_name(host_id, "HOST"))
    return Intent(
        command=command,
        what=f"host {host_id}",
        done="is drained",
        already="is drained already",
        look="muster host list",
    )


@changing()
def undrain(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    host_id: Host,
) -> Intent:
    """Place replicas on a host again.

    Example:
      muster host undrain host-1

    What runs elsewhere by now stays there.
    """
    command = UndrainHost(host_id=check_name(host_id, "HOST"))
    return Intent(
        command=command,
        what=f"host {host_id}",
        done="takes replicas again",
        already="takes replicas already",
        look="muster host list",
    )


app.command("list")(list_)
app.command("drain")(drain)
app.command("undrain")(undrain)
