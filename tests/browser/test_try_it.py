"""Calls of endpoints by a form that a FastAPI application describes, and by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit
from tests.support.browser.models import delete, deploy
from tests.support.browser.visitor import SOON_MS
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _models(stack: EmbeddedStack) -> Iterator[None]:
    deploy(stack, "rent", "Rent")
    deploy(stack, "plain", text="<b>as it is</b>")
    yield
    delete(stack, "rent", "plain")


def test_an_operation_of_fastapi_is_called_by_its_form(visit: Visit, way: str, stack: EmbeddedStack) -> None:
    visitor = visit("operate", way=way)
    visitor.open("/")
    visitor.press(visitor.row("rent").get_by_role("link", name="rent", exact=True))
    visitor.press(visitor.page.get_by_role("link", name="Try it", exact=True).last)
    page = visitor.page
    expect(page.get_by_role("heading", name="Response")).to_be_visible()
    reads = page.get_by_role("link", name="Read its OpenAPI schema")
    if reads.count():  # until the first who wants it has read it
        visitor.press(reads)
    visitor.press(page.get_by_role("link", name="/predict"))
    visitor.write(page.get_by_label("area_m2"), "70")
    visitor.write(page.get_by_label("rooms"), "3")
    visitor.press(page.get_by_role("button", name="Send"))
    response = page.get_by_role("region", name="Response")
    expect(response).to_contain_text("200", timeout=SOON_MS)
    expect(response).to_contain_text('"rent": 925')
    expect(response).to_contain_text("curl")
    expect(response).to_contain_text(f"{stack.record()['http_url']}/rent/predict")
    visitor.write(page.get_by_label("rooms"), "0")
    visitor.press(page.get_by_role("button", name="Send"))
    expect(response).to_contain_text("422", timeout=SOON_MS)
    expect(response).to_contain_text("greater than or equal to 1")


def test_a_request_is_written_by_hand_and_its_response_is_text(visit: Visit, way: str) -> None:
    visitor = visit("admin", way=way)
    visitor.open("/try?name=default/plain")
    visitor.press(visitor.page.get_by_role("button", name="Send"))
    response = visitor.page.get_by_role("region", name="Response")
    expect(response).to_contain_text("<b>as it is</b>", timeout=SOON_MS)
    expect(response).to_contain_text("200")


def test_who_may_only_view_may_not_call(visit: Visit) -> None:
    visitor = visit("view")
    visitor.open("/try?name=default/plain")
    expect(visitor.page.get_by_text("may see endpoints, but not call them")).to_be_visible()
    expect(visitor.page.get_by_role("button", name="Send")).to_be_disabled()
