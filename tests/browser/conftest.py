"""A browser, a stack with a console beside it, and people of all roles who are signed in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from muster.secrets import Secrets
from serve_common.identities.roles import Role
from tests.support.browser.console_process import ConsoleProcess, add_people, get_person
from tests.support.browser.visitor import KEYBOARD, MOUSE, SOON_MS, Visitor, find_browser
from tests.support.stacks.embedded_stack import EmbeddedStack

_FAILED = pytest.StashKey[bool]()

Visit = Callable[..., Visitor]
"""``visit(role)`` opens a page of a person with that role, None: of nobody; see `Visitor` for more options. Pages are
those of the fixture ``console``, unless ``console`` is another."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let fixtures know that their test failed."""
    report: Any = yield
    if report.when == "call" and report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="package")
def executable() -> str:
    """The browser's path."""
    found = find_browser()
    if found is None:
        if os.environ.get("CI") == "true" or os.environ.get("MUSTER_REQUIRE_BROWSER") == "1":
            pytest.fail("CI=true or MUSTER_REQUIRE_BROWSER=1, but there is no chromium")
        pytest.skip(
            "NOT TESTED: the console in a browser, for there is no chromium; 'make browser' installs it"
        )
    return found


@pytest.fixture(scope="module")
def browser(executable: str) -> Iterator[Browser]:
    """Ends with its module: the driver's loop runs in this thread until then, and no other could."""
    expect.set_options(timeout=SOON_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def running_stack(directory: Path) -> Iterator[EmbeddedStack]:
    """A stack with its state below ``directory``, and the people who may sign in to its console."""
    stack = EmbeddedStack(directory / "state")
    stack.start()
    try:
        add_people(Secrets(Path(stack.record()["secrets"])))
        yield stack
    finally:
        stack.stop()
        stack.output.close()


def console_beside(stack: EmbeddedStack) -> ConsoleProcess:
    """A console of that stack, which the caller starts."""
    record = stack.record()
    return ConsoleProcess(
        record["nats_url"],
        Secrets(Path(record["secrets"])),
        stack.state_dir.parent / "console.log",
        HTTP_URL=record["http_url"],
    )


@pytest.fixture(scope="package")
def stack(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStack]:
    """A stack that all tests share: each deploys under names of its own, and leaves what others deployed."""
    with running_stack(tmp_path_factory.mktemp("b")) as stack:
        yield stack


@pytest.fixture(scope="package")
def console(stack: EmbeddedStack) -> Iterator[ConsoleProcess]:
    """A console beside the stack."""
    with console_beside(stack) as console:
        yield console


@pytest.fixture(params=[MOUSE, KEYBOARD])
def way(request: pytest.FixtureRequest) -> str:
    """How people do it: with a mouse, or by keyboard alone on a narrow screen."""
    found: str = request.param
    return found


@pytest.fixture(scope="package")
def sessions() -> dict[tuple[str, str], Any]:
    """Cookies of people by console and role, so that each signs in once."""
    return {}


@pytest.fixture
def visit(
    request: pytest.FixtureRequest, browser: Browser, sessions: dict[tuple[str, str], Any], tmp_path: Path
) -> Iterator[Visit]:
    """Open pages; whatever a browser complains of fails the test, and what is seen then is saved."""
    visitors: list[Visitor] = []

    def visit(role: Role | str | None, *, console: ConsoleProcess | None = None, **options: Any) -> Visitor:
        # A module with a console of its own has a fixture of that name, too.
        console = console or request.getfixturevalue("console")
        assert console is not None
        state = None
        if role is not None:
            key = (console.url, Role(role).value)
            if key not in sessions:
                first = Visitor(browser, console.url)
                first.open("/sign-in")
                first.sign_in(get_person(role))
                first.page.wait_for_url(f"{console.url}/")
                sessions[key] = first.context.storage_state()
                first.close()
            state = sessions[key]
        visitors.append(Visitor(browser, console.url, state=state, **options))
        return visitors[-1]

    yield visit
    complaints = [each for visitor in visitors for each in visitor.unexpected]
    if complaints or request.node.stash.get(_FAILED, False):
        for number, visitor in enumerate(visitors):
            visitor.save(tmp_path / f"visitor-{number}")
        print(f"what was seen is in {tmp_path}; the console's log is in a directory beside it")
    for visitor in visitors:
        visitor.close()
    assert complaints == []
