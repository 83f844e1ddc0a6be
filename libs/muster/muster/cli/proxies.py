"""`muster proxy …`: the processes that take requests."""

from __future__ import annotations

from muster.cli.asking import Question, asking
from muster.cli.group import group
from muster.cli.session import Session
from muster.cli.show_status import show_proxies
from serve_common.wires.views import ProxyView

app = group("Proxies, which take requests: list.")


@asking
def list_(session: Session) -> Question[list[ProxyView]]:  # noqa: ARG001 - every command gets it
    """List proxies with their addresses and the snapshots that they applied."""
    return Question(lambda admin: admin.get_http_proxies(), show_proxies)


app.command("list")(list_)
