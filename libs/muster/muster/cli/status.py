"""`muster status`: what there is and how it is."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from muster.cli import output, tables
from muster.cli.connection import StackChoice
from muster.cli.options import JsonOption, NatsOption, PasswordFileOption, UserOption
from muster.cli.session import Session, session_of
from serve_common.names import deployment_tag
from serve_common.wires.views import DeploymentView, StatusView

_RETRY_S = 15.0


def status(
    context: typer.Context,
    *,
    name: Annotated[
        str | None, typer.Argument(help="deployment or app/deployment; all unless given.")
    ] = None,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Show deployments, hosts and proxies, or one deployment with its replicas.

    Examples:
      muster status
      muster status digits --json
    """
    session = session_of(context)
    with session.reporting(as_json=as_json):
        tag = None if name is None else deployment_tag(name)
        stack = StackChoice(nats=nats, user=user, password_file=password_file)
        view = asyncio.run(_status(session, stack, tag))
        if as_json:
            output.print_json(view)
        elif isinstance(view, StatusView):
            tables.show_status(view)
        else:
            tables.show_deployment(view)


async def _status(session: Session, options: StackChoice, name: str | None) -> StatusView | DeploymentView:
    with output.Progress("status") as progress:
        async with session.connect(session.find_stack(options), progress, retry_for_s=_RETRY_S) as stack:
            if name is None:
                return await stack.admin.get_status()
            return await stack.admin.get_deployment_info(name)
