"""The page of a deployment: what it shows to whom, and what when parts of the stack are away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import msgspec
import pytest

from muster.client.rates import LoadRates
from muster.client.requests import Feed, FeedMessage, StackAddress
from serve_common.api.queries import GetHistory, GetRevisions
from serve_common.api.views import (
    AutoscalingView,
    DeploymentStatus,
    DeploymentView,
    GoalStatus,
    HistoryView,
    ReplicaView,
    RevisionView,
)
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.errors import LimitReached, ServeError, TransientError
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_console.core.system import NOTHING_READ, RatesPoint, Trouble
from serve_console.shell.log_feeds import FEEDS_OF_PERSON_MAX, LogFeeds, LogTab
from serve_console.web.sign_in import COOKIE
from tests.support.console_world import ConsoleWorld, status

NAME = "shop/front"
TRACEBACK = "Traceback (most recent call last):\n  x\nValueError: \x1b[31m<script>alert(1)</script>"


def deployment(**more: Any) -> DeploymentView:
    fields: dict[str, Any] = {
        "status": DeploymentStatus.HEALTHY, "message": "", "route_prefix": "/shop", "methods": ["GET"],
        "version": "v2", "code_version": 1, "backend_config": BackendConfig(num_replicas=2),
        "replica_config": ReplicaConfig(import_path="m:M"), "goal_id": GoalId("g1"),
        "goal_status": GoalStatus.SUCCEEDED, "name": NAME,
        "replicas": [ReplicaView(replica_tag=f"{NAME}#1", state="running", host_id="h", version="v2")],
    }  # fmt: skip
    return DeploymentView(**{**fields, **more})


ENTRIES = [
    HistoryView(
        id=number, at=float(number), principal="<ana>", epoch=1, verb="scale", subject=NAME,
        goal_id=GoalId(f"g{number}"), request={"num_replicas": number},
        old={f"backend {NAME}": {"num_replicas": number - 1}}, new={f"backend {NAME}": {"num_replicas": number}},
    )
    for number in range(40, 0, -1)
]  # fmt: skip
REVISIONS = [
    RevisionView(
        revision=number, at=1.0, goal_id=GoalId(f"g{number}"), status=GoalStatus.SUCCEEDED,
        is_current=number == 3, version=f"v{number}", import_path="m:M", num_replicas=number,
    )
    for number in (3, 2, 1)
]  # fmt: skip


class Bench:
    """The console with one deployment and a person who is signed in."""

    def __init__(self, role: Role = Role.ADMIN) -> None:
        self.world = ConsoleWorld(GRAFANA_URL="http://grafana/")
        self.role = role
        self.fails: ServeError | None = None

    async def get(self, path: str, *views: DeploymentView, **more: Any) -> httpx.Response:
        token, session = await self.world.start_session(role=self.role)
        cast(Any, session.stack).live = self
        scaling = more.pop("autoscaling", [])
        fields = {
            "status": status(deployments=list(views), autoscaling=scaling), "read_at": self.world.clock.now()
        }  # fmt: skip
        self.world.hub.system = msgspec.structs.replace(NOTHING_READ, **{**fields, **more})
        async with self.world.browser() as browser:
            browser.cookies.set(COOKIE, token)
            return await browser.get(path)

    async def call(self, request: Any) -> Any:
        if self.fails is not None:
            raise self.fails
        match request:
            case GetHistory(limit=limit, before=before):
                return [entry for entry in ENTRIES if before is None or entry.id < before][:limit]
            case GetRevisions():
                return REVISIONS
        raise AssertionError(request)


async def test_the_overview_shows_its_figures_and_a_hostile_traceback_harmlessly() -> None:
    bench = Bench()
    rates = LoadRates(name=NAME, requests_per_s=12.5, p99_s=0.25)
    bench.world.hub.history[NAME] = cast(Any, [RatesPoint(5.0, rates)])
    view = deployment(status=DeploymentStatus.UNHEALTHY, message=TRACEBACK)
    page = await bench.get(f"/deployments/{NAME}", view, rates={NAME: rates})
    assert page.status_code == 200
    for shown in ("12.5", "250 ms", "shop/front#1", "Scale to 40", "http://grafana/d/muster-backend"):
        assert shown in page.text
    assert "<script>alert" not in page.text
    assert "\x1b" not in page.text
    assert "&lt;ana&gt;" in page.text


@pytest.mark.parametrize(
    ("role", "verbs", "missing"),
    [
        (Role.VIEW, [], ["scale", "delete_deployment"]),
        (Role.OPERATE, ["scale", "rollback", "set_traffic"], ["delete_deployment", "update_backend_config"]),
        (Role.ADMIN, ["scale", "delete_deployment", "start_rollout"], ["pause_autoscaling"]),
    ],
)
async def test_only_what_the_role_may_do_is_offered(role: Role, verbs: list[str], missing: list[str]) -> None:
    page = await Bench(role).get(f"/deployments/{NAME}", deployment())
    assert [verb for verb in verbs if f"/do/{verb}?" not in page.text] == []
    assert [verb for verb in missing if f"/do/{verb}?" in page.text] == []


async def test_an_unknown_name_is_a_404_and_a_short_one_leads_to_the_whole() -> None:
    assert (await Bench().get("/deployments/shop/other", deployment())).status_code == 404
    short = await Bench().get("/deployments/a", deployment(name="default/a"))
    assert short.headers["location"] == "/deployments/default/a"
    assert (await Bench().get(f"/deployments/{NAME}", status=None)).status_code == 503


@pytest.mark.parametrize("tab", ["overview", "logs", "configuration", "history"])
async def test_without_a_leader_every_tab_still_shows_what_was_read(tab: str) -> None:
    bench = Bench()
    bench.fails = TransientError("no controller <b>")
    away = Trouble("leader", "No controller leads.", "")
    page = await bench.get(f"/deployments/{NAME}?tab={tab}", deployment(), trouble=away)
    assert page.status_code == 200
    assert "No controller leads." in page.text
    assert ("cannot be read now" in page.text) == (tab in ("configuration", "history"))
    assert "controller <b>" not in page.text


async def test_the_history_is_paged_and_shows_what_changed() -> None:
    page = await Bench().get(f"/deployments/{NAME}?tab=history&before=30", deployment())
    assert "Scale to 29" in page.text
    assert "Scale to 10" in page.text
    assert "Scale to 9<" not in page.text
    assert "tab=history&amp;before=10" in page.text or "before=10" in page.text
    assert "  num_replicas: 29" in page.text
    assert (await Bench().get(f"/deployments/{NAME}?tab=history&before=x", deployment())).status_code == 400


async def test_the_configuration_compares_revisions_and_leads_back_to_them() -> None:
    page = await Bench().get(f"/deployments/{NAME}?tab=configuration&to=2", deployment())
    assert "Revision 1 to 2" in page.text
    assert "/do/rollback?name=shop/front&amp;to=1" in page.text
    assert "&amp;to=3" not in page.text.replace("tab=configuration&amp;to=3", "")
    unknown = await Bench().get(f"/deployments/{NAME}?tab=configuration&from=8&to=9", deployment())
    assert "no such revision" in unknown.text


async def test_autoscaling_is_a_tab_only_where_there_is_some() -> None:
    scaling = AutoscalingView(
        backend_tag=NAME,
        verdict="held",
        num_replicas=2,
        min_replicas=1,
        max_replicas=4,
        why="within <limits>",
    )
    page = await Bench().get(f"/deployments/{NAME}?tab=autoscaling", deployment(), autoscaling=[scaling])
    assert "within &lt;limits&gt;" in page.text
    without = await Bench().get(f"/deployments/{NAME}", deployment())
    assert "tab=autoscaling" not in without.text


class FakeLines:
    """Feeds of log lines."""

    def __init__(self) -> None:
        self.opened = 0
        self.open = 0
        self.messages: asyncio.Queue[FeedMessage] = asyncio.Queue()

    @asynccontextmanager
    async def listen(self, address: StackAddress, subjects: Sequence[str]) -> AsyncIterator[Feed]:
        self.opened, self.open = self.opened + 1, self.open + 1
        try:
            yield cast(Feed, self)
        finally:
            self.open -= 1

    async def publish(self, subject: str, payload: bytes) -> None:
        recalled = subject.replace("log-recall", "log.recalled.t.replica")
        await self.messages.put(FeedMessage(recalled, line("old", "info")))

    async def receive(self, within_s: float | None = None) -> FeedMessage | None:
        try:
            async with asyncio.timeout(within_s):
                return await self.messages.get()
        except TimeoutError:
            return None


def line(message: str, level: str, request_id: str = "") -> bytes:
    return msgspec.json.encode(
        {
            "event": "print", "message": message, "level": level, "service": "replica", "backend_tag": NAME,
            "request_id": request_id, "timestamp": "2026-01-01T00:00:00Z",
        }
    )  # fmt: skip


async def test_tabs_share_a_feed_that_closes_with_the_last_and_each_gets_what_it_filters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_console.shell.log_feeds._REPLAY_S", 0.02)
    world, lines, tasks = ConsoleWorld(), FakeLines(), TaskOwner("test")
    _, session = await world.start_session()
    feeds = LogFeeds(Subjects("serve"), lines.listen, world.clock, tasks)
    every, bad, late = LogTab(session, 0.0), LogTab(session, 0.0, level="error"), LogTab(session, 0.0)
    with feeds.watch(NAME, every), feeds.watch(NAME, bad):
        await asyncio.sleep(0.05)
        for text, level in [("fine", "info"), ("broken", "error")]:
            await lines.messages.put(FeedMessage(f"serve.log.replica.{NAME}", line(text, level)))
        await asyncio.sleep(0.05)
        with feeds.watch(NAME, late):
            texts = [[entry.text for entry in tab.buffer.take(1.0)[1]] for tab in (every, bad, late)]
        assert (lines.opened, len(feeds)) == (1, 1)
    assert texts == [["old", "fine", "broken"], ["broken"], ["old", "fine", "broken"]]
    await asyncio.sleep(0.01)
    assert (lines.open, len(feeds), len(tasks)) == (0, 0, 0)


async def test_one_person_cannot_take_all_feeds_of_logs() -> None:
    world, lines, tasks = ConsoleWorld(), FakeLines(), TaskOwner("test")
    (_, ana), (_, ben) = await world.start_session("ana"), await world.start_session("ben")
    feeds = LogFeeds(Subjects("serve"), lines.listen, world.clock, tasks)
    with contextlib.ExitStack() as watched:
        for number in range(FEEDS_OF_PERSON_MAX):
            watched.enter_context(feeds.watch(f"shop/{number}", LogTab(ana, 0.0)))
        feeds.check_limits("shop/0", ana)
        feeds.check_limits("shop/x", ben)
        with pytest.raises(LimitReached, match=f"ana watches the logs of {FEEDS_OF_PERSON_MAX}"):
            feeds.check_limits("shop/x", ana)
    await tasks.close(1.0)
