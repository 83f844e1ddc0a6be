"""`muster shutdown`: everything that was deployed goes away."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.changing import changing
from muster.cli.intent import Intent
from muster.cli.session import Session
from serve_common.wires.commands import Shutdown


@changing(timeout_s=600.0)
def shutdown(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Intent:
    """Delete every application, deployment, endpoint and backend.

    Example:
      muster shutdown --dry-run

    Asks first. Requests in flight finish. The stack itself stays up.
    """
    return Intent(
        command=Shutdown(confirm="everything"),
        what="everything",
        done="is deleted",
        already="is deleted; there is nothing",
        question="" if yes else "Delete every application, deployment, endpoint and backend?",
    )
