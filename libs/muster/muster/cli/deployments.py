"""Commands about deployments that exist: `muster scale`, `muster rollback`, `muster delete`."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli import output
from muster.cli.changing import changing
from muster.cli.intent import Intent
from muster.cli.session import Session
from serve_common.errors import BadField
from serve_common.limits import check_between
from serve_common.names import deployment_tag
from serve_common.values.backend_config import NUM_REPLICAS_MAX
from serve_common.wires.commands import DeleteDeployment, Rollback, Scale

Name = Annotated[str, typer.Argument(metavar="NAME", help="deployment or app/deployment.")]


@changing()
def scale(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    num_replicas: Annotated[int, typer.Argument(metavar="N", help="How many replicas shall run.")],
) -> Intent:
    """Run another number of replicas, and wait until they do.

    Example:
      muster scale digits 3

    No replica that stays is touched. It holds until the next deploy.
    Where there is autoscaling, it pauses, and the number stays until
    'muster autoscaling resume'.
    """
    tag = deployment_tag(name)
    check_between(num_replicas, 0, NUM_REPLICAS_MAX, "N")
    what = output.short_name(tag)
    return Intent(
        command=Scale(backend_tag=tag, num_replicas=num_replicas),
        what=what,
        done=f"is scaled to {num_replicas}",
        already=f"has {num_replicas} replicas already",
        look=f"muster status {what}",
        deployment=tag,
    )


@changing(timeout_s=600.0)
def rollback(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION", help="The version's name.")] = None,
    to_revision: Annotated[
        int | None,
        typer.Option("--to-revision", min=1, help="The revision's number; see 'muster revisions'."),
    ] = None,
) -> Intent:
    """Make a deployment be again what it was, and wait until it serves.

    Examples:
      muster rollback digits
      muster rollback digits --to v1
      muster rollback digits --to-revision 3

    Without --to it is what last succeeded before the present.
    """
    tag = deployment_tag(name)
    if to is not None and to_revision is not None:
        raise BadField("--to-revision", "and --to must not both be given")
    target = to_revision if to is None else to
    what = output.short_name(tag)
    words = "what it was before" if target is None else f"{'revision ' if to is None else ''}{target}"
    return Intent(
        command=Rollback(name=tag, to=target),
        what=what,
        done=f"is rolled back to {words}",
        already=f"is {words} already",
        look=f"muster status {what}",
        deployment=tag,
    )


@changing()
def delete(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
) -> Intent:
    """Delete a deployment and wait until its replicas are gone.

    Example:
      muster delete digits

    Requests in flight finish first. Deleting what does not exist is a
    success.
    """
    tag = deployment_tag(name)
    what = output.short_name(tag)
    return Intent(
        command=DeleteDeployment(name=tag),
        what=what,
        done="is deleted",
        already="does not exist",
        look=f"muster status {what}",
    )
