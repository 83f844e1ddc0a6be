"""The page Now, beside what `muster status` says, while the stack moves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import expect

from serve_common.api.commands import Scale
from serve_common.api.views import GoalStatus
from serve_common.names import short_name
from tests.browser.conftest import Visit
from tests.support.browser.models import delete, deploy
from tests.support.browser.visitor import Visitor
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)

READ = """() => {
  const text = (element) => element ? element.innerText.trim() : "";
  const tile = (label) => {
    const found = [...document.querySelectorAll(".stat")].find((e) => text(e.firstElementChild) === label);
    return found ? text(found.children[1]) : "";
  };
  return {
    hosts: tile("Hosts"), proxies: tile("Proxies"), deployments: tile("Deployments"), replicas: tile("Replicas"),
    rows: [...document.querySelectorAll("tbody tr")].map((row) => ({
      id: row.id,
      name: text(row.querySelector("a")),
      status: text(row.querySelector("[data-label=Status]")),
      version: text(row.querySelector("[data-label=Version] .mono:last-of-type")),
      running: text(row.querySelector("[data-label=Replicas] .sub")),
      dots: [...row.querySelectorAll(".dot")].map((dot) => dot.title),
    })),
  };
}"""
RUNNING = ("running", "updating")


def shown(visitor: Visitor) -> dict[str, Any]:
    """What the page shows, as `expected` has it."""
    page: dict[str, Any] = visitor.page.evaluate(READ)
    for row in page["rows"]:
        row["running"] = row["running"].split("·")[0].strip()
    return page


def expected(status: dict[str, Any]) -> dict[str, Any]:
    """What the page must show of `muster status --json`."""
    scaled = {view["backend_tag"]: view["num_replicas"] for view in status["autoscaling"]}
    rows = []
    for view in sorted(
        status["deployments"], key=lambda view: (view["application"] != "", view["application"])
    ):
        running = sum(replica["state"] in RUNNING for replica in view["replicas"])
        wanted = scaled.get(view["name"], view["backend_config"]["num_replicas"])
        rows.append(
            {
                "id": f"row-{view['name']}",
                "name": short_name(view["name"]),
                "status": view["status"],
                "version": view["version"] or "unversioned",
                "running": f"{running} of {wanted}",
                "dots": [
                    f"{short_name(replica['replica_tag'])}: {replica['state'].replace('_', ' ')}"
                    for replica in (*view["replicas"], *view["rollout_replicas"])
                ],
            }
        )
    live = {kind: sum(each["status"] == "live" for each in status[kind]) for kind in ("hosts", "proxies")}
    return {
        "hosts": f"{live['hosts']} live",
        "proxies": f"{live['proxies']} live",
        "deployments": str(len(rows)),
        "replicas": str(sum(int(row["running"].split(" of ")[0]) for row in rows)),
        "rows": rows,
    }


def test_now_shows_what_muster_status_says(visit: Visit, stack: EmbeddedStack) -> None:
    """Also while replicas start, scale and stop; compared again only while the state itself moves."""
    visitor = visit("view")
    visitor.open("/")
    equal = 0
    for step in (
        lambda: deploy(stack, "compared", version="one", replicas=3),
        lambda: stack.request(Scale(backend_tag="compared", num_replicas=1)),
        lambda: deploy(stack, "compared-broken", "Broken", ends=GoalStatus.FAILED),
        lambda: delete(stack, "compared-broken"),
    ):
        step()
        end = time.monotonic() + 60
        while True:
            before = expected(stack.status())
            page = shown(visitor)
            if page == before:
                equal += 1
                break
            # The page may be a second behind: what it lacks for longer than the state stands still is a difference.
            is_still = expected(stack.status()) == before
            visitor.page.wait_for_timeout(1_500)
            if is_still and expected(stack.status()) == before:
                assert shown(visitor) == before
            assert time.monotonic() < end, "the state never stood still"
    assert equal == 4
    delete(stack, "compared")


def test_a_deployment_comes_and_goes_while_the_page_is_open(visit: Visit, stack: EmbeddedStack) -> None:
    visitor = visit("view")
    visitor.open("/")
    deploy(stack, "comes", version="2026-11")
    row = visitor.row("comes")
    expect(row).to_contain_text("healthy")
    expect(row).to_contain_text("2026-11")
    expect(row).to_contain_text("1 of 1")
    expect(visitor.page.get_by_role("listitem").filter(has_text="comes").first).to_be_visible()
    delete(stack, "comes")
    expect(row).to_have_count(0)
