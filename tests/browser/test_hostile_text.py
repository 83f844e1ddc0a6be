"""Names and messages that are HTML, scripts and escapes of terminals are text on every page."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from serve_common.api.rollout_views import GateView, RolloutView
from serve_common.api.views import ApplicationView, DeploymentStatus, EventView, GoalStatus, HistoryView
from serve_common.names import GoalId
from tests.browser.conftest import Visit
from tests.support.browser.console_process import ConsoleProcess
from tests.support.browser.visitor import Visitor
from tests.support.stacks.large_stack import LargeStack, build_deployment

pytestmark = pytest.mark.timeout(300)

HTML = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
ANSI = "\x1b[31mred\x1b[0m \x1b]8;;https://example.org\x07link\x1b]8;;\x07 \x07\x9b2J end"
STREAM = "\r\revent: banner\rdata: taken over\r\r\u202eback"
"""Would be an event of its own, were its line ends taken for such."""
NAME = 'default/<script>document.title="taken"</script>'
VERSION = "'\"><svg onload=document.title='taken'>"


@pytest.fixture(scope="module")
def hostile(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeStack]:
    with LargeStack(tmp_path_factory.mktemp("hostile")) as stack:
        stack.hosts, stack.proxies = stack.hosts[:2], stack.proxies[:1]
        message = f"{HTML}\n{ANSI}{STREAM}"
        stack.add(
            [
                build_deployment(
                    NAME, status=DeploymentStatus.UNHEALTHY, message=message, version=VERSION, replicas=3
                ),
                build_deployment(
                    "default/plain", status=DeploymentStatus.UNHEALTHY, message=f"{ANSI}{STREAM}"
                ),
            ]
        )
        stack.applications = [
            ApplicationView(
                name=HTML,
                status=DeploymentStatus.UNHEALTHY,
                message=message,
                route_prefix=HTML,
                ingress=NAME,
                deployments=[],
                goal_id=GoalId("g1"),
                goal_status=GoalStatus.FAILED,
            )
        ]
        stack.rollouts = [
            RolloutView(
                backend_tag="default/plain",
                goal_id=GoalId("g1"),
                version=VERSION,
                state="running",
                outcome="",
                reason=message,
                steps=["5%", HTML],
                step=0,
                is_in_force=True,
                in_force_at=1.7e9,
                gates=[
                    GateView(kind=HTML, status="unknown", text=ANSI, canary_requests=3, requests_needed=None)
                ],
                passed=[],
                replica_failures={HTML: 1},
                started_at=1.7e9,
                decided_at=None,
                ended_at=None,
            )
        ]
        stack.events = [
            EventView(at=1.7e9, kind="replica", subject=NAME, message=message),
            EventView(at=1.7e9, kind="audit", subject=HTML, message=ANSI),
        ]
        stack.history = [
            HistoryView(
                id=1,
                at=1.7e9,
                principal=HTML,
                epoch=1,
                verb="deploy",
                subject=NAME,
                goal_id=None,
                request={"name": HTML, "text": ANSI},
                old={"version": HTML},
                new={"version": VERSION},
            )
        ]
        stack.change()
        yield stack


@pytest.fixture(scope="module")
def console(hostile: LargeStack) -> Iterator[ConsoleProcess]:
    log_path = hostile.server.directory / "console.log"
    with ConsoleProcess(hostile.server.url, hostile.secrets, log_path) as console:
        yield console


PATHS = [
    "/",
    f"/deployments/{quote(NAME)}",
    f"/deployments/{quote(NAME)}?tab=logs",
    f"/deployments/{quote(NAME)}?tab=configuration",
    "/rollouts",
    "/rollouts/default/plain",
    "/do/start_rollout?name=default/plain",
    "/hosts",
    "/events",
    f"/events?subject={quote(HTML)}",
    "/events?tab=history",
    f"/try?name={quote(NAME)}",
    f"/do/scale?backend_tag={quote(NAME)}",
    f"/do/delete_deployment?name={quote(HTML)}",
    f"/deploy?name={quote(NAME)}",
    "/goals/g1",
]


def test_what_is_shown_is_text_on_every_page(visit: Visit, hostile: LargeStack) -> None:
    visitor = visit("admin")
    for path in PATHS:
        visitor.open(path)
        visitor.page.wait_for_timeout(1_200)  # its stream sends the same again
        check_text(visitor, path)


def check_text(visitor: Visitor, path: str) -> None:
    """Nothing of the page is markup that users wrote, nor what a terminal would obey."""
    main = visitor.page.get_by_role("main")
    expect(main).to_be_visible()
    assert visitor.page.title() != "taken", path
    assert (
        visitor.page.locator("main img, main b:text-is('bold'), main script, main svg[onload]").count() == 0
    ), path
    text = main.inner_text()
    assert [c for c in text if not (c.isprintable() or c in "\n\t\xa0")] == [], path
    expect(visitor.page.locator("#banner")).to_have_text("")


def test_now_shows_markup_as_it_was_written(visit: Visit, hostile: LargeStack) -> None:
    visitor = visit("admin")
    visitor.open("/")
    main = visitor.page.get_by_role("main")
    expect(main).to_contain_text('<script>document.title="taken"</script>')
    expect(main).to_contain_text(HTML)
    expect(main).to_contain_text(VERSION)
    expect(visitor.row("plain")).to_contain_text("red link end")
