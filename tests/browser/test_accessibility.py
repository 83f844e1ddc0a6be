"""What a screen reader, a keyboard and a narrow screen need, on every page and in both themes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from serve_common.names import GoalId
from tests.browser.conftest import Visit
from tests.support.browser.console_process import PASSWORD, get_person
from tests.support.browser.models import delete, deploy
from tests.support.browser.pages import PAGES
from tests.support.browser.visitor import SOON_MS, Visitor
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def goal_id(stack: EmbeddedStack) -> Iterator[GoalId]:
    """The goal of a deployment ``seen`` with two revisions."""
    deploy(stack, "seen", version="v1", replicas=2)
    yield deploy(stack, "seen", version="v2", replicas=2, text="second").goal_id
    delete(stack, "seen")


def open_each(visit: Visit, goal_id: GoalId, **options: object) -> Iterator[tuple[str, Visitor]]:
    """Every page, also the dry run, the goal and an error, with its name."""
    visitor, nobody = visit("admin", **options), visit(None, **options)
    for name, path in PAGES.items():
        who = nobody if name == "sign-in" else visitor
        who.open(path)
        yield name, who
    visitor.open(f"/goals/{goal_id}")
    yield "goal", visitor
    visitor.open("/do/delete_deployment?name=default/seen")
    visitor.page.get_by_role("button", name="Show what it would do").click()
    visitor.page.get_by_label("Type seen to delete it").wait_for()
    yield "plan", visitor
    visitor.expected.append("status of 404")
    visitor.open("/nowhere", status=404)
    yield "error", visitor


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_violations_on_any_page(visit: Visit, goal_id: GoalId, theme: str) -> None:
    found = {}
    for name, visitor in open_each(visit, goal_id, theme=theme, bypass_csp=True):
        if violations := visitor.find_axe_violations():
            found[name] = violations
    assert not found, json.dumps(found, indent=1)


def test_no_page_scrolls_sideways_on_a_phone(visit: Visit, goal_id: GoalId) -> None:
    found = {}
    for name, visitor in open_each(visit, goal_id, width=375):
        if overflow := visitor.get_overflow():
            found[name] = overflow
    assert found == {}


@pytest.mark.parametrize("width", [1280, 375])
def test_by_keyboard_alone_a_deployment_is_opened_and_scaled(
    visit: Visit, stack: EmbeddedStack, width: int
) -> None:
    """Also on a phone's narrow screen."""
    name = f"typed-{width}"
    deploy(stack, name)
    visitor = visit(None, width=width)
    visitor.open("/sign-in")
    page, keyboard = visitor.page, visitor.page.keyboard
    keyboard.type(get_person("operate"))  # the first field has the focus
    keyboard.press("Tab")
    keyboard.type(PASSWORD)
    keyboard.press("Enter")
    page.wait_for_url("**/")
    visitor.tab_to(page.get_by_role("link", name="Skip to the content"))
    keyboard.press("Enter")
    visitor.tab_to(visitor.row(name).get_by_role("link", name=name, exact=True))
    keyboard.press("Enter")
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
    visitor.tab_to(page.get_by_role("main").get_by_role("link", name="Scale"))
    keyboard.press("Enter")
    visitor.tab_to(page.get_by_label("Number of replicas"))
    keyboard.press("ControlOrMeta+a")
    keyboard.type("2")
    keyboard.press("Enter")
    expect(page.get_by_text("A dry run: nothing is changed yet.")).to_be_visible()
    visitor.tab_to(page.get_by_role("button", name="Apply"))
    keyboard.press("Enter")
    page.wait_for_url("**/goals/**")
    state = page.get_by_role("region", name="State of the change")
    expect(state).to_contain_text("Done", timeout=2 * SOON_MS)
    assert visitor.get_overflow() == []
    visitor.sign_out()
    delete(stack, name)
