"""Changes by their forms: what was typed becomes a command, is planned, and is made once."""

from __future__ import annotations

import asyncio
import html
import io
import json
import re
import zipfile
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from muster.client.admin import AdminClient, Caller
from serve_common.api import commands as c
from serve_common.api.views import (
    BackendConfigView,
    EndpointView,
    GoalStatus,
    GoalView,
    HistoryView,
    PlannedAction,
    PlannedReplica,
    PlanView,
    RevisionView,
)
from serve_common.clock import SystemClock
from serve_common.config.backend import HttpOptions, ReplicaConfig
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    Conflict,
    FencedOut,
    NotFound,
    NotLeading,
    ServeError,
)
from serve_common.identities.roles import Role
from serve_common.names import GoalId
from serve_common.protocol.code import digest_code
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import Environment
from serve_common.runtime.tasks import TaskOwner
from serve_console.core.change_kinds import CHANGES
from serve_console.core.goal_page import GoalSubject, build_goal_page
from serve_console.core.system import NOTHING_READ
from serve_console.core.uploaded_archives import repack
from serve_console.settings import read_settings
from serve_console.shell.hub import Hub
from serve_console.shell.sessions import PersonSession, Sessions
from serve_console.web.app import build_app
from serve_console.web.goals import GoalPages
from serve_console.web.shared import Renderer, Shared
from serve_console.web.sign_in import SignIn, SignInPages
from tests.unit.muster.cli.conftest import DEPLOYMENT, STATUS, PlayedController
from tests.unit.serve_console.test_change_forms import archive

TAG = "default/digits"
SYSTEM = msgspec.structs.replace(
    NOTHING_READ,
    read_at=4e9,
    status=STATUS,
    endpoints={TAG: EndpointView(endpoint_tag=TAG, route="/digits", methods=["GET"], traffic={TAG: 1.0})},
)
PRESENT = BackendConfigView(
    backend_tag=TAG,
    backend_config=DEPLOYMENT.backend_config,
    replica_config=DEPLOYMENT.replica_config,
    version="v1",
)
PLAN = PlanView(
    updating=True,
    replicas=[
        PlannedReplica(action=PlannedAction.START, backend_tag=TAG, replica_tag=None, why="num <1> \x1b[31m→ 2"),
        PlannedReplica(action=PlannedAction.STOP, backend_tag=TAG, replica_tag=f"{TAG}#1", why="is old"),
    ],
    notes=["there is room"],
)  # fmt: skip
REVISION = RevisionView(
    revision=7, at=1.0, goal_id=GoalId("g1"), status=GoalStatus.SUCCEEDED, is_current=True, version="v1",
    import_path="digits:Digits", num_replicas=1,
)  # fmt: skip


class _Stack:
    """Implements `StackPort` over a controller that the test plays."""

    def __init__(self, controller: PlayedController) -> None:
        self.address: Any = None
        self.admin = AdminClient(controller, Subjects(), principal="ana", retry_for_s=0.0)
        self.live = self.admin
        self.caller = Caller(controller, Subjects())

    async def connect(self, within_s: float) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""


class Browser:
    """A person's browser without a script: loads pages, fills in their forms, sends them."""

    def __init__(self, controller: PlayedController, role: Role = Role.ADMIN) -> None:
        clock = SystemClock()
        variables = {"MUSTER_CONSOLE_USERS_FILE": "/nowhere", "MUSTER_CONSOLE_APPS_DIR": "/apps"}
        settings, sessions = read_settings(Environment(variables)), Sessions(clock, idle_s=600, longest_s=600)
        hub = Hub(sessions, Subjects(), lambda *_: None, clock)  # type: ignore[arg-type,return-value] - never listens
        hub.system = SYSTEM
        self.session = PersonSession("ana", role, _Stack(controller), proof="", now=clock.now())

        async def find_session(_request: Any) -> PersonSession:
            return self.session

        renderer = Renderer(settings)
        sign_in = SignIn(
            settings, sessions, clock, read_people=dict, open_stack=lambda *_: _Stack(controller)
        )
        shared = Shared(settings, hub, sessions, renderer, clock, TaskOwner("console"), find_session)
        self.shared = shared
        pages = SignInPages(settings, renderer, sign_in, sessions)
        app = build_app(shared, pages, settings.allowed_hosts)
        self._client = TestClient(app, base_url="http://localhost", follow_redirects=False)

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def send(self, page: httpx.Response, files: Any = None, path: str = "", **typed: str) -> httpx.Response:
        action, fields = parse_form(page.text)
        return self._client.post(path or action, data={**fields, **typed}, files=files)


def parse_form(text: str) -> tuple[str, dict[str, str]]:
    """Where the page's form goes, and what a browser would send."""
    found = re.search(r'<form class="(?:form|stack)[^>]*action="(/do/[^"]+)".*?</form>', text, re.DOTALL)
    assert found is not None
    fields = dict[str, str]()
    for tag in re.findall(r"<input([^>]*)>", found[0]):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if attributes.get("type") == "file" or (
            attributes.get("type") == "checkbox" and "checked" not in tag
        ):
            continue
        fields[attributes["name"]] = html.unescape(attributes.get("value", ""))
    for name, value in re.findall(
        r'<textarea[^>]*name="([^"]+)"[^>]*>\n?(.*?)</textarea>', found[0], re.DOTALL
    ):
        fields[name] = html.unescape(value)
    for name, options in re.findall(r'<select[^>]*name="([^"]+)"[^>]*>(.*?)</select>', found[0], re.DOTALL):
        values = re.findall(r'<option value="([^"]*)"( selected)?', options)
        fields[name] = next((value for value, chosen in values if chosen), values[0][0])
    return found[1], fields


@pytest.fixture
def controller() -> PlayedController:
    played = PlayedController()
    played.answers |= {
        "plan": PLAN,
        "get_backend_config": PRESENT,
        "get_all_backends": [],
        "get_revisions": [REVISION],
        "get_http_config": HttpOptions(),
        "get_history": [],
        "upload_code": c.UploadCodeReply(is_stored=True),
    }
    return played


@pytest.fixture
def browser(controller: PlayedController) -> Browser:
    return Browser(controller)


def test_the_dry_run_shows_each_replica_with_its_reason(browser: Browser) -> None:
    page = browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="2")
    assert page.status_code == 200
    for shown in ("1 replica starts, 1 stops", "num &lt;1&gt; → 2", "is old", "there is room"):
        assert shown in page.text
    assert "muster scale digits 2" in page.text


def test_a_plan_with_nothing_to_do_offers_no_change(browser: Browser, controller: PlayedController) -> None:
    controller.answers["plan"] = PlanView(updating=False, replicas=[], notes=[])
    page = browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="1")
    assert "Nothing to do" in page.text
    assert ">Apply<" not in page.text


def test_a_change_is_made_once_and_leads_to_its_goal(browser: Browser, controller: PlayedController) -> None:
    plan = browser.send(browser.get("/do/rollback?name=digits"), to="7")
    first, second = browser.send(plan), browser.send(plan)
    assert first.status_code == second.status_code == 303
    assert first.headers["location"].startswith("/goals/goal-1?verb=rollback&name=default%2Fdigits")
    one, two = controller.asked_of("rollback")
    assert one.to == 7
    assert one.request_id == two.request_id
    assert one.request_id


def test_a_change_without_a_goal_is_done_at_once(browser: Browser, controller: PlayedController) -> None:
    controller.answers["scale"] = c.ChangeReply(goal_id=None, updating=True)
    response = browser.send(browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="2"))
    page = browser.get(response.headers["location"])
    assert "Done" in page.text
    assert "Open digits" in page.text


@pytest.mark.parametrize(
    "command", ["", "{}", '{"backend_tag": "x", "num_replicas": 1, "sudo": true}', "[" * 9999]
)
def test_a_command_that_was_tampered_with_is_refused(
    browser: Browser, controller: PlayedController, command: str
) -> None:
    plan = browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="2")
    assert browser.send(plan, command=command).status_code == 400
    assert browser.send(plan, path="/do/shutdown/apply").status_code == 404
    assert not controller.asked_of("scale")


@pytest.mark.parametrize("name", ["", "digit", "default/other"])
def test_nothing_is_deleted_without_its_name(
    browser: Browser, controller: PlayedController, name: str
) -> None:
    plan = browser.send(browser.get("/do/delete_deployment?name=digits"))
    page = browser.send(plan, confirm=name)
    assert page.status_code == 422
    assert "Type digits to delete it." in page.text
    assert not controller.asked_of("delete_deployment")
    assert browser.send(page, confirm="digits").status_code == 303
    assert controller.asked_of("delete_deployment") == [c.DeleteDeployment(name=TAG)]


def test_refusals_keep_what_was_typed_and_name_the_field(
    browser: Browser, controller: PlayedController
) -> None:
    form = browser.get("/do/scale?backend_tag=digits")
    controller.answers["plan"] = BadField("num_replicas", "is beyond max_replicas")
    page = browser.send(form, num_replicas="77")
    assert page.status_code == 400
    assert parse_form(page.text)[1]["num_replicas"] == "77"
    assert re.search(r'aria-invalid="true"[^>]*>', page.text)
    assert "is beyond max_replicas" in page.text
    controller.answers["plan"] = Conflict("another change is under way")
    assert "another change is under way" in browser.send(form, num_replicas="77").text


def test_what_is_away_is_said_and_can_be_tried_again(browser: Browser, controller: PlayedController) -> None:
    plan = browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="2")
    controller.raises = BusUnavailable("gone")
    page = browser.send(plan)
    assert page.status_code == 503
    assert "NATS is away" in page.text
    controller.raises = None
    assert browser.send(page).status_code == 303


@pytest.mark.parametrize(
    ("failure", "status"), [(BusAuthorizationFailed("no"), 403), (FencedOut("other"), 503)]
)
def test_a_refusal_by_nats_or_a_former_leader_is_no_failure_of_the_console(
    browser: Browser, controller: PlayedController, failure: ServeError, status: int
) -> None:
    plan = browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="2")
    controller.raises = failure
    assert browser.send(plan).status_code == status


def test_a_plan_leads_back_to_its_form_with_all_that_was_typed(browser: Browser) -> None:
    plan = browser.send(browser.get("/do/scale?backend_tag=digits"), num_replicas="12")
    form = browser.send(plan, path="/do/scale/edit")
    assert parse_form(form.text)[1]["num_replicas"] == "12"


@pytest.mark.parametrize("verb", sorted(CHANGES))
def test_every_form_shows_and_is_refused_to_roles_that_may_not(
    controller: PlayedController, verb: str
) -> None:
    subject = CHANGES[verb].subject
    path = f"/do/{verb}?{subject}=digits"
    assert Browser(controller).get(path).status_code in {200, 303}
    assert Browser(controller).get(f"/do/{verb}").status_code in {200, 303}
    viewer = Browser(controller, Role.VIEW).get(path)
    assert viewer.status_code == 403
    assert "needs the role" in viewer.text


def test_an_unknown_verb_is_no_page(browser: Browser) -> None:
    assert browser.get("/do/shutdown").status_code == 404


def test_a_packaged_app_is_uploaded_repacked_and_deployed(
    browser: Browser, controller: PlayedController
) -> None:
    data = archive(**{"app/digits.py": "x = 1", "app/__pycache__/digits.pyc": "no"})
    form = browser.get("/deploy?source=packaged")
    plan = browser.send(
        form, files={"archive": ("app.zip", data)}, name="digits", import_path="digits:Digits"
    )
    assert plan.status_code == 200, plan.text
    command = msgspec.json.decode(parse_form(plan.text)[1]["command"], type=c.Deploy)
    packed = repack(data, "digits:Digits")
    assert zipfile.ZipFile(io.BytesIO(packed)).namelist() == ["digits.py"]
    assert command.replica_config.working_dir == digest_code(packed)
    assert controller.asked_of("upload_code")[0].digest == digest_code(packed)
    again = browser.send(plan, path="/do/deploy/edit")
    assert parse_form(again.text)[1]["working_dir"] == digest_code(packed)


FAILED = GoalView(
    goal_id=GoalId("g7"), status=GoalStatus.FAILED, error="Traceback …\n\x1b[31mValueError: <b>\x1b[0m"
)
SUBJECT = GoalSubject(verb="deploy", name=TAG, at=1.0, by="ana")


def test_a_failed_goal_shows_why_what_serves_and_what_to_do() -> None:
    page = build_goal_page(FAILED, SUBJECT, SYSTEM, "")
    assert page.traceback == "Traceback …\nValueError: <b>"
    assert page.message == "digits goes on serving: 1 replica of version v1."
    assert "/do/rollback?name=default/digits" in {link.href for link in page.links}


def test_a_deploy_that_failed_is_corrected_from_what_was_sent(
    browser: Browser, controller: PlayedController
) -> None:
    sent = c.Deploy(
        name=TAG, version="v3", replica_config=ReplicaConfig(import_path="digits:Wrong", app_dir="/x")
    )
    controller.answers["get_history"] = [
        HistoryView(id=1, at=5.0, principal="ana", epoch=1, verb="deploy", subject=TAG, goal_id=GoalId("g7"),
                    request=msgspec.to_builtins(sent))
    ]  # fmt: skip
    fields = parse_form(browser.get(f"/deploy?name={TAG}&goal=g7").text)[1]
    assert (fields["name"], fields["version"]) == ("digits", "v3")
    assert (fields["import_path"], fields["app_dir"]) == ("digits:Wrong", "/x")
    assert parse_form(browser.get(f"/deploy?name={TAG}").text)[1]["import_path"] == "digits:Digits"


def test_an_archive_need_not_be_chosen_again_after_a_mistake(browser: Browser) -> None:
    form, data = browser.get("/deploy?source=packaged"), archive(**{"digits.py": ""})
    page = browser.send(form, files={"archive": ("a.zip", data)}, name="a b", import_path="digits:Digits")
    assert page.status_code == 422
    assert parse_form(page.text)[1]["working_dir"] == digest_code(repack(data, "digits:Digits"))


def test_the_page_of_a_goal_names_the_change_and_its_person(
    browser: Browser, controller: PlayedController
) -> None:
    controller.answers["get_history"] = [
        HistoryView(id=1, at=5.0, principal="ana", epoch=1, verb="scale", subject=TAG, goal_id=GoalId("goal-1"),
                    request={})
    ]  # fmt: skip
    controller.goal = GoalView(
        goal_id=GoalId("goal-1"), status=GoalStatus.PENDING, message="1 replica <starts>"
    )
    page = browser.get("/goals/goal-1").text
    for shown in ("Scale digits", "by ana", "1 replica &lt;starts&gt;", "Under way", "1 of 1"):
        assert shown in page


def test_goals_that_are_unknown_or_without_a_leader_are_said(
    browser: Browser, controller: PlayedController
) -> None:
    controller.answers["wait_for_goal"] = NotFound("no goal")
    assert browser.get("/goals/g9").status_code == 404
    controller.raises = BusUnavailable("gone")
    page = browser.get("/goals/g9")
    assert page.status_code == 200
    assert "No controller leads" in page.text


def test_a_goal_is_followed_through_a_change_of_leader_until_the_session_ends(
    browser: Browser, controller: PlayedController
) -> None:
    async def follow() -> str:
        received = []
        controller.progress = ["1 of 2 runs"]
        stream = GoalPages(browser.shared)._stream(browser.session, GoalId("goal-1"), SUBJECT)
        async for chunk in stream:
            received.append(chunk.decode())
            if "No controller leads" in received[-1]:
                controller.raises = None
            elif "1 of 2 runs" in received[-1]:
                controller.raises = NotLeading("no more")
            elif "Done" in received[-1]:
                browser.session.is_over = True
                await browser.shared.hub.close()
        return "".join(received)

    text = asyncio.run(follow())
    shown = ("Under way", "1 of 2 runs", "No controller leads", "Done")
    places = [text.index(each) for each in shown]
    assert places == sorted(places)


def test_json_of_the_form_is_what_the_controller_gets(browser: Browser) -> None:
    plan = browser.send(
        browser.get("/do/update_backend_config?backend_tag=digits"), user_config='{"a": "</textarea>"}'
    )
    command = json.loads(parse_form(plan.text)[1]["command"])
    assert command["config"] == {"user_config": {"a": "</textarea>"}}
