"""A page that is open while the leader is killed, while NATS is away and while the console itself is: it says so, and
comes back by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit
from tests.support.browser.console_process import ConsoleProcess, get_person
from tests.support.browser.models import delete, deploy
from tests.support.browser.visitor import LOST_STREAM, SOON_MS
from tests.support.stacks.embedded_stack import EmbeddedStack
from tests.support.stacks.large_stack import LargeStack, build_deployment
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

NATS_AWAY_S = 10.0
KILLS_MAX = 10


@pytest.fixture(scope="module")
def cut_off(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeStack]:
    """A stack whose NATS may be killed without harm to others."""
    with LargeStack(tmp_path_factory.mktemp("cut-off")) as stack:
        stack.add([build_deployment("default/seen")])
        yield stack


@pytest.fixture
def cut_off_console(cut_off: LargeStack) -> Iterator[ConsoleProcess]:
    log_path = cut_off.server.directory / "console.log"
    log_path.unlink(missing_ok=True)
    with ConsoleProcess(cut_off.server.url, cut_off.secrets, log_path) as console:
        yield console


def test_a_killed_leader_is_said_and_its_successor_is_found(visit: Visit, stack: EmbeddedStack) -> None:
    deploy(stack, "outlives")
    visitor = visit("admin")
    visitor.open("/")
    expect(visitor.row("outlives")).to_contain_text("1 of 1")
    visitor.page.wait_for_timeout(1_000)  # its stream is open
    banner = visitor.page.get_by_text("No controller leads at the moment.")
    killed = set[int]()
    while not banner.is_visible():  # a successor may lead before the page reads again: it is killed, too
        pid = stack.pid("controller")
        if pid not in {0, *killed}:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert len(killed) < KILLS_MAX, "never said"
        visitor.page.wait_for_timeout(100)
    expect(visitor.row("outlives")).to_contain_text("1 of 1")
    expect(banner).to_have_count(0, timeout=SOON_MS)
    assert stack.pid("controller") not in killed
    deploy(stack, "afterwards")
    expect(visitor.row("afterwards")).to_contain_text("healthy", timeout=SOON_MS)
    delete(stack, "outlives", "afterwards")


def test_without_nats_for_ten_seconds_a_page_says_so_and_comes_back(
    visit: Visit, cut_off: LargeStack, cut_off_console: ConsoleProcess
) -> None:
    visitor = visit("admin", console=cut_off_console)
    visitor.open("/")
    expect(visitor.row("seen")).to_contain_text("10 of 10")
    visitor.page.wait_for_timeout(1_000)
    cut_off.server.kill()
    killed_at = time.monotonic()
    banner = visitor.page.get_by_text("NATS is away.")
    expect(banner).to_be_visible(timeout=SOON_MS)
    assert time.monotonic() - killed_at < NATS_AWAY_S, "said too late to be of use"
    expect(visitor.row("seen")).to_contain_text("10 of 10")
    started = time.monotonic()
    visitor.page.reload()  # a page that is opened now says the same, and does not hang
    assert time.monotonic() - started < 5.0
    expect(banner).to_be_visible()
    visitor.page.wait_for_timeout(max(0.0, killed_at + NATS_AWAY_S - time.monotonic()) * 1000)
    cut_off.add([build_deployment("default/new")])
    cut_off.server.start()
    expect(visitor.row("new")).to_contain_text("10 of 10", timeout=SOON_MS)
    expect(banner).to_have_count(0)


def test_without_the_console_a_page_says_so_and_afterwards_that_its_session_is_over(
    visit: Visit, cut_off: LargeStack
) -> None:
    log_path = cut_off.server.directory / "short-console.log"
    with ConsoleProcess(cut_off.server.url, cut_off.secrets, log_path) as console:
        visitor = visit("view", console=console)
        visitor.expected.append(LOST_STREAM)
        visitor.open("/")
        visitor.page.wait_for_timeout(1_000)
    lost = visitor.page.get_by_text("Connection to the console lost; trying again.")
    expect(lost).to_be_visible(timeout=SOON_MS)
    expect(visitor.row("seen")).to_be_visible()
    # Sessions live in memory: the console that comes back knows none.
    port = str(urlsplit(console.url).port)
    with ConsoleProcess(cut_off.server.url, cut_off.secrets, log_path, PORT=port):
        expect(visitor.page.get_by_text("You are signed out.")).to_be_visible()
        expect(lost).to_be_hidden()
        visitor.page.wait_for_timeout(2_000)  # no further try
        expect(lost).to_be_hidden()
        visitor.page.get_by_role("link", name="Sign in again").click()
        visitor.sign_in(get_person("view"))
        expect(visitor.row("seen")).to_be_visible()


def test_nobody_signs_in_while_nats_is_away_and_is_told_why(
    visit: Visit, cut_off: LargeStack, cut_off_console: ConsoleProcess
) -> None:
    cut_off.server.kill()
    try:
        visitor = visit(None, console=cut_off_console)
        visitor.expected.append("status of 503")
        visitor.open("/sign-in")
        visitor.sign_in("view@example.org")
        expect(visitor.page.get_by_role("alert")).to_contain_text("NATS is away", timeout=SOON_MS)
    finally:
        cut_off.server.start()
    until(lambda: cut_off.client.is_connected)
