"""`muster status`: what there is and how it is."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from muster.cli import output
from muster.cli.asking import Question, asking
from muster.cli.ports import AdminPort
from muster.cli.session import Session
from muster.cli.show_status import show_deployment, show_status
from serve_common.errors import LimitReached
from serve_common.names import deployment_tag
from serve_common.wires.queries import GetDeploymentInfo, GetStatus, ListDeployments
from serve_common.wires.views import StatusView


@asking
def status(
    session: Session,
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="deployment or app/deployment; all unless given.")
    ] = None,
) -> Question[Any]:
    """Show deployments, hosts and proxies, or one deployment with its replicas.

    Examples:
      muster status
      muster status digits --json

    'muster info' and 'muster events' tell more of one deployment.
    """
    if name is not None:
        query = GetDeploymentInfo(name=deployment_tag(name))
        return Question(lambda admin: admin.get_deployment_info(query), show_deployment)
    if (full := session.full_disk()) is not None:
        output.complain(full)
    whole = _Whole(session)
    return Question(whole.ask, whole.show)


class _Whole:
    """The whole system, its deployments in pages where they are more than one message carries."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def ask(self, admin: AdminPort) -> StatusView:
        try:
            return await admin.get_status(GetStatus())
        except LimitReached:
            view = await admin.get_status(GetStatus(deployments=False))
        return msgspec.structs.replace(view, deployments=await admin.list_deployments(ListDeployments()))

    def show(self, view: StatusView) -> None:
        show_status(view)
        if self._session.has_plain_users:
            output.complain(
                "warning: NATS has plain users: replicas can read and answer each other's requests (see SECURITY.md)"
            )
