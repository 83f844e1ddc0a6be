"""Signing in and out, and what each role may do: by the pages, and by NATS itself."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import expect

from muster.client import StackAddress
from muster.client.admin import AdminClient
from muster.client.nats import NatsRequests
from muster.client.people import address_of_person
from muster.console_users import add_person, find_source, read_people, set_person_password
from muster.secrets import Secrets
from serve_common.api.commands import Command, DeleteDeployment, Scale
from serve_common.errors import BusAuthorizationFailed
from serve_common.identities.people import open_person
from serve_common.identities.roles import Role
from serve_common.protocol.subjects import Subjects
from tests.browser.conftest import Visit
from tests.support.browser.console_process import PASSWORD, get_person
from tests.support.browser.visitor import LOST_STREAM
from tests.support.stacks.embedded_stack import EmbeddedStack

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("role", ["view", "operate", "admin"])
def test_each_role_signs_in_and_out(visit: Visit, way: str, role: str) -> None:
    visitor = visit(None, way=way)
    visitor.open("/?from=a-link")
    assert visitor.page.url.endswith("/sign-in?next=/%3Ffrom%3Da-link")
    visitor.sign_in(get_person(role))
    visitor.page.wait_for_url("**/?from=a-link")
    expect(visitor.page.get_by_role("heading", name="Now", level=1)).to_be_visible()
    expect(visitor.page.get_by_text(get_person(role))).to_be_visible()
    expect(visitor.page.get_by_text(role, exact=True)).to_be_visible()
    deploys = visitor.page.get_by_role("main").get_by_role("link", name="Deploy", exact=True)
    assert deploys.count() == (1 if role == "admin" else 0)
    cookies = {cookie["name"]: cookie for cookie in visitor.context.cookies()}
    assert cookies["muster_session"]["httpOnly"]
    assert cookies["muster_session"]["sameSite"] == "Strict"
    visitor.sign_out()
    expect(visitor.page.get_by_role("heading", name="Sign in")).to_be_visible()
    visitor.page.go_back()
    expect(visitor.page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_wrong_password_is_refused_and_too_many_are_delayed(
    visit: Visit, way: str, stack: EmbeddedStack
) -> None:
    name = f"guessed-by-{way}@example.org"
    add_person(_source(stack), name, Role.VIEW, PASSWORD)
    visitor = visit(None, way=way)
    visitor.expected.append("status of 403")
    visitor.open("/sign-in")
    alert = visitor.page.get_by_role("alert")
    # Until the next wait is longer than a slow machine needs for the form.
    for wait_ms in (0, 0, 0, 2_100, 4_100):
        visitor.page.wait_for_timeout(wait_ms)
        visitor.sign_in(name, "not the password")
        expect(alert).to_have_text("The name or the password is wrong.")
    visitor.sign_in(name)
    expect(alert).to_contain_text("Too many attempts. Try again in")
    visitor.page.wait_for_timeout(8_100)
    visitor.sign_in(name)
    expect(visitor.page.get_by_role("heading", name="Now", level=1)).to_be_visible()


def test_an_unknown_person_is_refused_as_one_with_a_wrong_password(visit: Visit) -> None:
    visitor = visit(None)
    visitor.expected.append("status of 403")
    visitor.open("/sign-in")
    visitor.sign_in("<script>alert(1)</script>", "whatever it is")
    expect(visitor.page.get_by_role("alert")).to_have_text("The name or the password is wrong.")
    expect(visitor.page.get_by_label("Name")).to_have_value("<script>alert(1)</script>")


def test_another_password_ends_the_persons_sessions_while_a_page_is_open(
    visit: Visit, stack: EmbeddedStack
) -> None:
    name = "moved@example.org"
    add_person(_source(stack), name, Role.VIEW, PASSWORD)
    visitor = visit(None)
    visitor.open("/sign-in")
    visitor.sign_in(name)
    visitor.expected.append(LOST_STREAM)
    expect(visitor.page.get_by_role("heading", name="Now", level=1)).to_be_visible()
    set_person_password(_source(stack), name, PASSWORD[::-1])
    expect(visitor.page.get_by_text("You are signed out.")).to_be_visible()
    visitor.page.get_by_role("link", name="Sign in again").click()
    visitor.sign_in(name, PASSWORD[::-1])
    expect(visitor.page.get_by_role("heading", name="Now", level=1)).to_be_visible()


@pytest.mark.parametrize(
    ("role", "command", "is_allowed"),
    [
        (Role.VIEW, Scale(backend_tag="nothing", num_replicas=1), False),
        (Role.OPERATE, DeleteDeployment(name="nothing"), False),
        (Role.ADMIN, DeleteDeployment(name="nothing"), True),
    ],
)
def test_nats_itself_refuses_what_is_not_of_the_role(
    stack: EmbeddedStack, role: Role, command: Command[object], is_allowed: bool
) -> None:
    """With the very identity that the person's password opens: the page is not what refuses."""
    with ThreadPoolExecutor(1) as thread:
        refusal = thread.submit(asyncio.run, _send(stack, role, command)).result()
    assert isinstance(refusal, BusAuthorizationFailed) is not is_allowed


async def _send(stack: EmbeddedStack, role: Role, command: Command[object]) -> Exception | None:
    record = stack.record()
    person = read_people(Secrets(Path(record["secrets"])))[get_person(role)]
    base = StackAddress(urls=(record["nats_url"],))
    requests = NatsRequests(address_of_person(base, person.name, role, open_person(person, PASSWORD)))
    try:
        await AdminClient(requests, Subjects(), retry_for_s=0.0).call(command)
    except Exception as error:
        return error
    finally:
        await requests.close()
    return None


def _source(stack: EmbeddedStack):
    return find_source(Secrets(Path(stack.record()["secrets"])))
