"""Changes as people make them: form, dry run, the change with its progress, and what has become of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from serve_common.api.commands import CreateBackend, CreateEndpoint, DeleteBackend, DeleteEndpoint
from serve_common.api.queries import GetAllEndpoints
from serve_common.config.backend import RayActorOptions, ReplicaConfig
from tests.browser.conftest import Visit
from tests.support.browser.changes import apply, show_plan
from tests.support.browser.console_process import ConsoleProcess
from tests.support.browser.load import under_load
from tests.support.browser.models import delete, deploy, wait_for_goal
from tests.support.browser.visitor import SOON_MS, Visitor
from tests.support.paths import APPS
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)


def find_mark(visitor: Visitor, title: str) -> None:
    """Move the pointer over the first chart until its legend says what is marked there."""
    expect(visitor.page.locator("[data-marks]")).to_contain_text(title)
    chart = visitor.page.locator(".chart").first
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    for left in range(int(box["width"]), -1, -2):
        visitor.page.mouse.move(box["x"] + left, box["y"] + box["height"] / 2)
        if title in chart.locator(".u-legend").inner_text():
            return
    raise AssertionError(f"{title!r} is marked nowhere")


def test_a_broken_version_is_deployed_its_traceback_read_and_rolled_back(
    visit: Visit, way: str, stack: EmbeddedStack
) -> None:
    visitor = visit("admin", way=way)
    visitor.open("/deploy")
    page = visitor.page
    visitor.write(page.get_by_label("Name", exact=True), "fragile")
    visitor.write(page.get_by_label("Version", exact=True), "good")
    visitor.write(page.get_by_label("Import path"), "shown_models:Steady")
    visitor.write(page.get_by_label("Directory"), str(APPS / "browser_app"))
    visitor.write(page.get_by_label("Route"), "/fragile")
    visitor.write(page.get_by_label("CPUs of each"), "0.05")
    show_plan(visitor)
    apply(visitor)
    url = f"{stack.record()['http_url']}/fragile"
    assert httpx.get(url).text == "steady"

    visitor.open("/deploy?name=default/fragile")
    visitor.write(page.get_by_label("Version", exact=True), "broken")
    visitor.write(page.get_by_label("Import path"), "shown_models:Broken")
    show_plan(visitor)
    expect(page.get_by_role("table")).to_contain_text("start")
    apply(visitor, ends="Failed")
    expect(page.get_by_role("main")).to_contain_text("RuntimeError: the weights <b>are</b> missing")
    expect(page.get_by_role("main")).to_contain_text("Traceback")
    assert httpx.get(url).text == "steady"
    visitor.open("/")
    expect(visitor.row("fragile")).to_contain_text("good")
    expect(visitor.row("fragile")).to_contain_text("1 of 1")

    deploy(stack, "fragile", version="other", text="other")
    visitor.open("/do/rollback?name=default/fragile")
    show_plan(visitor)
    apply(visitor)
    visitor.open("/")
    expect(visitor.row("fragile")).to_contain_text("good")
    assert httpx.get(url).text == "steady"
    delete(stack, "fragile")


def test_replicas_are_scaled_under_load_and_their_dots_come(
    visit: Visit, way: str, stack: EmbeddedStack
) -> None:
    deploy(stack, "wide", seconds=0.01)
    visitor, watcher = visit("operate", way=way), visit("view")
    watcher.open("/")
    with under_load(f"{stack.record()['http_url']}/wide") as load:
        expect(watcher.row("wide")).not_to_contain_text("\N{EN DASH}", timeout=SOON_MS)
        visitor.open("/do/scale?backend_tag=default/wide")
        visitor.write(visitor.page.get_by_label("Number of replicas"), "3")
        show_plan(visitor)
        expect(visitor.page.get_by_role("heading", name=re.compile("start", re.IGNORECASE))).to_be_visible()
        expect(visitor.page.get_by_text("muster scale wide 3")).to_be_visible()
        apply(visitor)
        expect(watcher.row("wide")).to_contain_text("3 of 3", timeout=SOON_MS)
        assert watcher.row("wide").locator(".dot-running").count() == 3
        watcher.open("/deployments/default/wide")
        find_mark(watcher, "Scale to 3")
    assert load.failures == []
    delete(stack, "wide")


def test_nothing_is_deleted_before_its_name_is_typed(visit: Visit, way: str, stack: EmbeddedStack) -> None:
    deploy(stack, "doomed")
    visitor = visit("admin", way=way)
    visitor.expected.append("status of 422")
    visitor.open("/do/delete_deployment?name=default/doomed")
    show_plan(visitor)
    confirm = visitor.page.get_by_label("Type doomed to delete it")
    button = visitor.page.get_by_role("button", name="Delete")
    visitor.write(confirm, "another")
    visitor.press(button)
    expect(visitor.page.get_by_text("Type doomed to delete it.")).to_be_visible()
    assert any(view["name"] == "default/doomed" for view in stack.status()["deployments"])
    visitor.write(confirm, "doomed")
    visitor.press(button)
    expect(visitor.page.get_by_role("region", name="State of the change")).to_contain_text(
        "Done", timeout=SOON_MS
    )
    visitor.open("/")
    expect(visitor.row("doomed")).to_have_count(0)


@pytest.fixture
def two_backends(stack: EmbeddedStack) -> Iterator[str]:
    """An endpoint ``parted`` with all traffic on the first of two backends."""
    for name in ("parted-a", "parted-b"):
        code = ReplicaConfig(
            import_path="shown_models:Steady",
            app_dir=str(APPS / "browser_app"),
            init_kwargs={"text": name},
            ray_actor_options=RayActorOptions(num_cpus=0.05),
        )
        goal_id = stack.request(CreateBackend(backend_tag=name, replica_config=code)).goal_id
        assert goal_id is not None
        wait_for_goal(stack, goal_id)
    stack.request(CreateEndpoint(endpoint="parted", traffic={"parted-a": 1.0}, route="/parted"))
    yield "default/parted"
    stack.request(DeleteEndpoint(endpoint="parted"))
    for name in ("parted-a", "parted-b"):
        stack.request(DeleteBackend(backend_tag=name))


def test_traffic_is_split_and_shadowed_after_a_dry_run(
    visit: Visit, way: str, stack: EmbeddedStack, two_backends: str
) -> None:
    visitor = visit("operate", way=way)
    visitor.open(f"/do/set_traffic?endpoint={two_backends}")
    page = visitor.page
    visitor.write(page.get_by_label("parted-a"), "75")
    visitor.write(page.get_by_label("parted-b"), "25")
    show_plan(visitor)
    expect(page.get_by_text(re.compile("muster .*parted.*0.75"))).to_be_visible()
    apply(visitor)
    visitor.open(f"/do/shadow_traffic?endpoint={two_backends}")
    visitor.choose(page.get_by_label("Copies go to"), "parted-b")
    visitor.write(page.get_by_label(re.compile("Share|Proportion")), "50")
    show_plan(visitor)
    apply(visitor)
    [view] = [each for each in stack.request(GetAllEndpoints()) if each.endpoint_tag == two_backends]
    assert view.traffic == {"default/parted-a": 0.75, "default/parted-b": 0.25}
    assert view.shadows == {"default/parted-b": 0.5}


def test_who_may_only_view_is_refused_by_page_and_by_form(
    visit: Visit, stack: EmbeddedStack, console: ConsoleProcess
) -> None:
    deploy(stack, "viewed")
    visitor = visit("view")
    visitor.expected.append("status of 403")
    visitor.open("/do/scale?backend_tag=default/viewed", status=403)
    expect(visitor.page.get_by_text("This change needs the role operate or admin")).to_be_visible()
    visitor.open("/")
    status = visitor.page.evaluate(
        """async () => {
          const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRF-Token"];
          const body = new URLSearchParams({csrf, command: '{"backend_tag": "default/viewed", "num_replicas": 0}'});
          return (await fetch("/do/scale/apply", {method: "POST", body, redirect: "manual"})).status;
        }"""
    )
    assert status == 403
    [view] = [each for each in stack.status()["deployments"] if each["name"] == "default/viewed"]
    assert view["backend_config"]["num_replicas"] == 1
    delete(stack, "viewed")


def test_a_form_without_its_token_changes_nothing(visit: Visit, stack: EmbeddedStack) -> None:
    deploy(stack, "guarded")
    visitor = visit("admin")
    visitor.expected.append("status of 403")
    visitor.open("/")
    status = visitor.page.evaluate(
        """async () => (await fetch("/do/scale/apply", {method: "POST", redirect: "manual", body:
          new URLSearchParams({command: '{"backend_tag": "default/guarded", "num_replicas": 0}'})})).status"""
    )
    assert status == 403
    [view] = [each for each in stack.status()["deployments"] if each["name"] == "default/guarded"]
    assert view["backend_config"]["num_replicas"] == 1
    delete(stack, "guarded")
