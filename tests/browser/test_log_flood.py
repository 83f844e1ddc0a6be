"""Five thousand log lines a second: a page that shows them stays of use, and says what it leaves out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from serve_common.nats.client import close_nats
from tests.browser.conftest import Visit
from tests.support.browser.console_process import ConsoleProcess
from tests.support.browser.visitor import SOON_MS
from tests.support.stacks.large_stack import LargeStack, build_deployment

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]

NAME = "default/noisy"
LINES_PER_S = 5_000
PIECE = 50
"""Lines in one message, as replicas send them."""
FLOOD_S = 12.0
CLICK_S = 1.0
GROWTH_BYTES = 60 * 2**20


@pytest.fixture(scope="module")
def noisy(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeStack]:
    with LargeStack(tmp_path_factory.mktemp("noisy")) as stack:
        stack.add([build_deployment(NAME, replicas=1)])
        yield stack


@pytest.fixture(scope="module")
def console(noisy: LargeStack) -> Iterator[ConsoleProcess]:
    log_path = noisy.server.directory / "console.log"
    with ConsoleProcess(noisy.server.url, noisy.secrets, log_path) as console:
        yield console


def test_a_page_under_five_thousand_lines_a_second_stays_of_use(
    visit: Visit, noisy: LargeStack, console: ConsoleProcess
) -> None:
    visitor = visit("view")
    visitor.open(f"/deployments/{NAME}?tab=logs")
    page = visitor.page
    log = page.get_by_role("log")
    flood = noisy.start(_flood(noisy))
    expect(log).to_contain_text("line number", timeout=SOON_MS)
    before = console.usage.memory_info().rss
    expect(log.get_by_text("left out here").first).to_be_visible(timeout=SOON_MS)
    page.wait_for_timeout(FLOOD_S / 2 * 1000)
    assert 0 < log.locator(".log-line").count() < 2_500
    started = time.monotonic()
    page.get_by_role("link", name="Configuration").click()
    expect(page.get_by_role("link", name="Configuration")).to_have_attribute("aria-current", "page")
    clicked_s = time.monotonic() - started
    sent, seconds = flood.result(SOON_MS / 1000)
    assert sent / seconds > LINES_PER_S * 0.8, "the test itself was too slow"
    assert clicked_s < CLICK_S
    assert console.usage.memory_info().rss - before < GROWTH_BYTES


async def _flood(stack: LargeStack) -> tuple[int, float]:
    """How many lines were sent in how many seconds."""
    client = await stack.connect_replica(f"{NAME}#1")
    subject = stack.subjects.log("replica", f"{NAME}#1")
    started, sent = time.monotonic(), 0
    try:
        while (passed := time.monotonic() - started) < FLOOD_S:
            while sent < passed * LINES_PER_S:
                lines = [_line(sent + number) for number in range(PIECE)]
                await client.publish(subject, b"".join(lines))
                sent += PIECE
            await client.flush()
            await asyncio.sleep(0.01)
        return sent, time.monotonic() - started
    finally:
        await close_nats(client)


def _line(number: int) -> bytes:
    line = {
        "event": "log",
        "logger": "model",
        "message": f"line number {number} of a model that talks too much",
        "replica_tag": f"{NAME}#1",
        "backend_tag": NAME,
        "service": "replica",
        "level": "info",
        "timestamp": "2026-11-28T12:00:00.000000Z",
    }
    return json.dumps(line).encode() + b"\n"
