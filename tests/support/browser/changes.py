"""A change as a person makes it: from its form to the dry run, and on to its end."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.browser.visitor import SOON_MS, Visitor


def show_plan(visitor: Visitor) -> None:
    """From the form to the dry run."""
    visitor.press(visitor.page.get_by_role("button", name="Show what it would do"))
    expect(visitor.page.get_by_text("A dry run: nothing is changed yet.")).to_be_visible()


def apply(visitor: Visitor, *, ends: str = "Done") -> None:
    """From the dry run to the end of the change."""
    visitor.press(visitor.page.get_by_role("button", name="Apply"))
    visitor.page.wait_for_url("**/goals/**")
    state = visitor.page.get_by_role("region", name="State of the change")
    expect(state).to_contain_text(ends, timeout=2 * SOON_MS)
