"""The console in its container: people sign in, and who may is decided on the machine."""

from __future__ import annotations

import re

import httpx
import pytest

from muster.console_users import add_person, find_source, remove_person
from serve_common.identities.roles import Role
from tests.compose.stack import Stack

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

PASSWORD = "correct horse"


def sign_in(client: httpx.Client, name: str, password: str) -> None:
    """Try to sign in, as a browser does."""
    form = client.get("/sign-in").text
    token = re.search(r'name="csrf" value="([^"]+)"', form)
    assert token is not None, form
    client.post("/sign-in", data={"csrf": token[1], "name": name, "password": password})


def test_the_first_person_signs_in_and_sees_the_hosts(stack: Stack) -> None:
    password = stack.secrets.path("console_admin_password").read_text().strip()
    url = f"http://{stack.address('console', 8080)}"
    with httpx.Client(base_url=url, timeout=30.0) as client:
        assert client.get("/").headers["location"] == "/sign-in"
        sign_in(client, "admin", password)
        for page, words in (("/hosts", "controller"), ("/", "Replicas")):
            stack.wait_until(
                lambda page=page, words=words: words in client.get(page).text, f"{page} shows {words}"
            )


def test_people_who_are_added_or_removed_on_the_machine_are_so_inside(stack: Stack) -> None:
    url = f"http://{stack.address('console', 8080)}"
    source = find_source(stack.secrets)
    add_person(source, "ada@example.org", Role.VIEW, PASSWORD)
    with httpx.Client(base_url=url, timeout=30.0) as client:
        sign_in(client, "ada@example.org", PASSWORD)
        assert client.get("/").status_code == 200
        assert client.get("/do/scale").status_code == 403
        remove_person(source, "ada@example.org")
        stack.wait_until(lambda: client.get("/").status_code == 303, "the session has ended")
