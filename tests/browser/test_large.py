"""Two hundred deployments with two thousand replicas: how soon they are seen, and what happens to them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
from playwright.sync_api import expect

from serve_common.api.views import DeploymentStatus, EventView
from tests.browser.conftest import Visit
from tests.support.browser.console_process import ConsoleProcess
from tests.support.stacks.large_stack import LargeStack, build_deployment

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]

DEPLOYMENTS, REPLICAS = 200, 10
FIRST_PAINT_MS = 500.0
EVENT_SEEN_MS = 1000.0
TRIES = 5


@pytest.fixture(scope="module")
def large(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeStack]:
    with LargeStack(tmp_path_factory.mktemp("large")) as large:
        large.add(build_deployment(f"default/model-{n:03}", replicas=REPLICAS) for n in range(DEPLOYMENTS))
        yield large


@pytest.fixture(scope="module")
def console(large: LargeStack) -> Iterator[ConsoleProcess]:
    log_path = large.server.directory / "console.log"
    with ConsoleProcess(large.server.url, large.secrets, log_path) as console:
        yield console


def test_now_is_seen_within_500_ms(visit: Visit) -> None:
    visitor = visit("view")
    paints = []
    for _ in range(TRIES):
        visitor.open("/")
        paints.append(visitor.get_first_paint_ms())
    dots = visitor.page.locator(".dot")
    assert dots.count() == DEPLOYMENTS * REPLICAS
    assert min(paints) < FIRST_PAINT_MS, paints


def test_an_event_is_seen_within_a_second(visit: Visit, large: LargeStack) -> None:
    visitor = visit("view")
    visitor.open("/")
    visitor.page.wait_for_timeout(1_500)  # its stream is open
    delays = []
    for number in range(TRIES):
        text = f"replica {number} was lost"
        started = time.monotonic()
        large.publish_event(_event(text))
        expect(visitor.page.get_by_text(text)).to_be_visible()
        delays.append((time.monotonic() - started) * 1000)
        visitor.page.wait_for_timeout(700)
    assert sorted(delays)[TRIES // 2] < EVENT_SEEN_MS, delays


def test_a_deployment_that_falls_ill_is_shown_first(visit: Visit, large: LargeStack) -> None:
    visitor = visit("view")
    visitor.open("/")
    well = large.deployments["default/model-150"]
    ill = msgspec.structs.replace(well, status=DeploymentStatus.UNHEALTHY, message="no host has 8 GPUs")
    large.add([ill])
    needs = visitor.page.get_by_role("region", name="Needs attention")
    expect(needs).to_contain_text("model-150")
    expect(needs).to_contain_text("no host has 8 GPUs")
    visitor.page.get_by_label("Filter deployments by name").fill("model-150")
    rows = visitor.page.get_by_role("row").filter(has=visitor.page.get_by_role("link"))
    expect(rows).to_have_count(1)
    large.add([well])
    expect(needs).to_have_count(0)


def _event(text: str) -> EventView:
    at = time.time()  # noqa: TID251 - as the controller's clock
    return EventView(at=at, kind="replica", subject="default/model-001#1", message=text)
