"""A rollout of a version that fails some requests, watched until it is aborted by itself."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit
from tests.support.browser.load import under_load
from tests.support.browser.models import delete, deploy
from tests.support.browser.visitor import SOON_MS
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)


def test_a_rollout_is_watched_to_its_abort(visit: Visit, way: str, stack: EmbeddedStack) -> None:
    """Started by the form, watched on the page of the rollout and on Now; the old version serves all the time."""
    deploy(stack, "rolls", version="v1", replicas=2)
    visitor, watcher = visit("admin", way=way), visit("view")
    page = visitor.page
    with under_load(f"{stack.record()['http_url']}/rolls", threads=6, pause_s=0.005) as load:
        visitor.open("/do/start_rollout?name=default/rolls")
        visitor.write(page.get_by_label("Version", exact=True), "v2")
        visitor.write(page.get_by_label("Steps"), "20%, 50%, 100%")
        visitor.press(page.get_by_text("More settings"))
        changes = '{"init_kwargs": {"text": "worse", "errors": 0.5}}'
        visitor.write(page.get_by_label("Other changes of the code"), changes)
        visitor.press(page.get_by_role("button", name="Show what it would do"))
        expect(page.get_by_text("A dry run: nothing is changed yet.")).to_be_visible()
        visitor.press(page.get_by_role("button", name="Apply"))
        page.wait_for_url("**/goals/**")
        watcher.open("/rollouts/default/rolls")
        main = watcher.page.get_by_role("main")
        expect(main).to_contain_text("v2")
        expect(main).to_contain_text("aborted", timeout=4 * SOON_MS)
        expect(main).to_contain_text("error", ignore_case=True)
        state = page.get_by_role("region", name="State of the change")
        expect(state).to_contain_text("Aborted", timeout=SOON_MS, ignore_case=True)
        watcher.open("/")
        expect(watcher.row("rolls")).to_contain_text("2 of 2", timeout=SOON_MS)
        expect(watcher.row("rolls")).to_contain_text("v1")
    assert set(load.failures) <= {"500"}
    watcher.open("/rollouts")
    expect(watcher.page.get_by_role("row").filter(has_text="rolls")).to_contain_text("aborted")
    delete(stack, "rolls")
