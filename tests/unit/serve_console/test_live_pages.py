"""The pages of rollouts, hosts and events, as a browser gets them from a console without a stack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

from serve_common.api.rollout_views import DifferencesView, GateView, RolloutView
from serve_common.api.views import EventView, HistoryView, HostView, ProxyView, StatusView
from serve_common.clock import SystemClock
from serve_common.errors import BusUnavailable
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import Environment
from serve_common.runtime.tasks import TaskOwner
from serve_console.core.system import NOTHING_READ
from serve_console.settings import read_settings
from serve_console.shell.hub import Hub
from serve_console.shell.sessions import PersonSession, Sessions
from serve_console.web.events import EventPages
from serve_console.web.hosts import HostsPages
from serve_console.web.live import LiveStreams
from serve_console.web.rollouts import RolloutPages
from serve_console.web.shared import Renderer, Shared

HOSTILE = "<script>alert(1)</script>"


class Admin:
    """Replies to the query of the history, or is away."""

    def __init__(self) -> None:
        self.history: list[HistoryView] | None = []

    async def call(self, _query: object) -> list[HistoryView]:
        if self.history is None:
            raise BusUnavailable("NATS is away")
        return self.history


class Console:
    """The pages with a state that tests set."""

    def __init__(self, role: Role = Role.ADMIN) -> None:
        clock, settings = SystemClock(), read_settings(Environment({"MUSTER_CONSOLE_USERS_FILE": "users"}))
        sessions = Sessions(clock, idle_s=60, longest_s=60)
        self.admin = Admin()
        self.hub = Hub(sessions, Subjects("serve"), cast(Any, None), clock)
        stack = cast(Any, SimpleNamespace(live=self.admin))
        session = PersonSession("ana", role, stack, proof="", now=clock.now())

        async def find_session(_request: Request) -> PersonSession:
            return session

        shared = Shared(
            settings=settings, hub=self.hub, sessions=sessions, renderer=Renderer(settings), clock=clock,
            tasks=cast(TaskOwner, None), find_session=find_session,
        )  # fmt: skip
        streams = LiveStreams(shared)
        pages = (RolloutPages(shared, streams), HostsPages(shared, streams), EventPages(shared, streams))
        self._client = TestClient(Starlette(routes=[route for page in pages for route in page.routes()]))
        self._now = clock.now()

    def show(self, *rollouts: RolloutView, hosts: int = 1) -> None:
        status = StatusView(
            controller_id="c1", epoch=1, store_available=True, snapshot_id=3, deployments=[],
            hosts=[
                HostView(host_id=f"h{number}", status="live", report_age_s=0.1, resources={"CPU": 4.0}, num_replicas=0)
                for number in range(hosts)
            ],
            proxies=[
                ProxyView(proxy_id="p1", status="live", report_age_s=0.1, address="h:1", applied_snapshot_id=1)
            ],
        )  # fmt: skip
        self.hub.system = msgspec.structs.replace(
            NOTHING_READ,
            version=1,
            read_at=self._now + 1e6,
            status=status,
            rollouts={view.backend_tag: view for view in rollouts},
        )

    def get(self, path: str, status: int = 200) -> str:
        response = self._client.get(path)
        assert response.status_code == status
        return response.text


@pytest.fixture
def console() -> Console:
    console = Console()
    console.show()
    return console


def rollout(**more: Any) -> RolloutView:
    gate = GateView(kind="errors", status="unknown", text=HOSTILE, canary_requests=3, requests_needed=140)
    differences = DifferencesView(
        compared=9, different=2, baseline_different=0, examples=[f"$.a: \x1b[31m{HOSTILE}"]
    )
    fields: dict[str, Any] = {
        "backend_tag": "default/hello", "goal_id": GoalId("g1"), "version": HOSTILE, "state": "running",
        "outcome": "", "reason": "", "steps": ["10%", "100%"], "step": 0, "is_in_force": True, "in_force_at": 5.0,
        "gates": [gate], "passed": [], "differences": differences, "replica_failures": {"canary": 1},
        "started_at": 1.0, "decided_at": None, "ended_at": None,
    }  # fmt: skip
    return RolloutView(**{**fields, **more})


def test_a_rollout_shows_hostile_text_as_text_and_offers_what_can_be_done(console: Console) -> None:
    console.show(rollout())

    for path in ("/rollouts", "/rollouts/default/hello"):
        page = console.get(path)
        assert HOSTILE not in page
        assert "needs about 140 more requests" in page
    assert "\x1b" not in page
    assert "/do/control_rollout?name=default/hello&amp;action=abort" in page


def test_people_who_may_only_view_are_offered_no_change() -> None:
    console = Console(Role.VIEW)
    console.show(rollout())

    assert "/do/" not in console.get("/rollouts/default/hello") + console.get("/hosts")


def test_a_short_name_leads_to_the_full_one_and_an_unknown_one_is_not_found(console: Console) -> None:
    console.show(rollout())

    assert "Rollout of hello" in console.get("/rollouts/hello")
    console.get("/rollouts/other", status=404)
    console.get("/rollouts/a/b/c", status=404)


def test_empty_pages_say_what_to_do(console: Console) -> None:
    console.show(hosts=0)

    assert "muster rollout --help" in console.get("/rollouts")
    assert "No host reports" in console.get("/hosts")
    assert "Nothing has happened yet" in console.get("/events")
    assert "No event matches" in console.get("/events?kind=goal")


def test_pages_work_before_anything_was_read(console: Console) -> None:
    console.hub.system = msgspec.structs.replace(NOTHING_READ, read_at=1e12)

    for path in ("/rollouts", "/rollouts/default/hello", "/hosts", "/events"):
        console.get(path)


def test_hosts_show_their_drain_and_proxies_how_far_behind_they_are(console: Console) -> None:
    page = console.get("/hosts")

    assert "/do/drain_host?host_id=h0" in page
    assert "2 behind" in page


def test_events_respect_the_filter_of_the_address_also_live(console: Console) -> None:
    for kind in ("goal", "replica"):
        console.hub.events.append(
            EventView(at=1.0, kind=kind, subject="default/a", message=f"{kind} {HOSTILE}", state="running")
        )

    page = console.get("/events?kind=goal&text=script")

    assert "goal &lt;script&gt;" in page
    assert "replica &lt;script&gt;" not in page
    assert "&amp;kind=goal&amp;text=script" in page
    assert "<td" in page
    assert "&lt;td" not in page


def test_the_history_shows_who_did_what_and_the_way_to_older_entries(console: Console) -> None:
    console.admin.history = [
        HistoryView(
            id=number, at=1.0, principal=HOSTILE, epoch=1, verb="scale", subject="default/a", goal_id=GoalId("g7"),
            request={"text": HOSTILE}, old={"n": 1}, new={"n": 2},
        )
        for number in range(60, 9, -1)
    ]  # fmt: skip

    page = console.get("/events?tab=history&subject=default/a")

    assert HOSTILE not in page
    assert "/goals/g7" in page
    assert "before=11&amp;subject=default/a" in page


def test_a_history_that_cannot_be_read_is_a_note_on_the_page(console: Console) -> None:
    console.admin.history = None

    assert "NATS is away" in console.get("/events?tab=history")
