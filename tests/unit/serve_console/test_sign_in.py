"""Signing in: by password, and by a proxy in front that is trusted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve_common.errors import BusAuthorizationFailed, BusUnavailable, ServeError
from serve_common.identities.people import PasswordWrong, PlainUser, encode_plain_user
from serve_common.identities.roles import Role
from serve_console.web import sign_in as sign_in_module
from tests.support.console_world import PASSWORD, ConsoleWorld, cookies_set, seal, submit


async def test_the_right_password_opens_a_session_whose_cookie_no_script_and_no_other_site_gets() -> None:
    world = ConsoleWorld(seal("ada", Role.VIEW))
    async with world.browser() as browser:
        response = await submit(browser, "ada", next="/hosts")
        assert (response.status_code, response.headers["location"]) == (303, "/hosts")
        [cookie] = [each for each in cookies_set(response) if each.startswith("muster_session=")]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert "Secure" not in cookie
        assert (await browser.get("/")).status_code == 200
    assert world.stacks[0].address.role is Role.VIEW
    assert world.sign_in.results["ok"] == 1


async def test_with_https_cookies_are_sent_over_it_only() -> None:
    world = ConsoleWorld(seal("ada"), HTTPS="1")
    async with world.browser() as browser:
        page = await browser.get("/sign-in")
    assert all("Secure" in cookie for cookie in cookies_set(page))


async def test_wrong_passwords_and_unknown_names_look_alike_and_both_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, tried = ConsoleWorld(seal("ada")), []

    def note(person: object, _password: str) -> str:
        tried.append(person)
        raise PasswordWrong("the password is wrong")

    monkeypatch.setattr(sign_in_module, "open_person", note)
    async with world.browser() as browser:
        pages = [await submit(browser, name, "not this one") for name in ("ada", "bob")]
    assert [page.status_code for page in pages] == [403, 403]
    assert pages[0].text.replace("ada", "bob") == pages[1].text
    assert len(tried) == 2
    assert (world.sign_in.results["wrong"], len(world.sessions)) == (2, 0)


async def test_attempts_are_limited_by_name_and_the_right_password_must_wait_too() -> None:
    world = ConsoleWorld(seal("ada"))
    async with world.browser() as browser:
        for _ in range(3):
            assert "wrong" in (await submit(browser, "ada", "not this one")).text
        limited = await submit(browser, "ada", PASSWORD)
        assert "Too many attempts" in limited.text
        world.clock.time += 2.5
        assert (await submit(browser, "ada")).status_code == 303
        assert world.sign_in.results["limited"] == 1


async def test_attempts_are_limited_by_address_whatever_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_in_module, "_UNKNOWN_PERSON", seal("nobody"))
    world = ConsoleWorld(seal("ada"))
    async with world.browser("2001:db8::1") as browser, world.browser("2001:db8::2:7") as neighbour:
        for number in range(20):
            await submit(browser, f"name{number}", "not this one")
        assert "Too many attempts" in (await submit(neighbour, "ada")).text
    async with world.browser("2001:db8:0:1::1") as other:
        assert (await submit(other, "ada")).status_code == 303


@pytest.mark.parametrize(
    ("failure", "status", "text", "result"),
    [
        (BusUnavailable("away"), 503, "NATS is away", "bus_away"),
        (BusAuthorizationFailed("revoked"), 403, "NATS refuses this person", "refused"),
    ],
)
async def test_a_stack_that_is_away_or_refuses_is_said_and_the_connection_closed(
    failure: ServeError, status: int, text: str, result: str
) -> None:
    world = ConsoleWorld(seal("ada"))
    world.refuses = failure
    async with world.browser() as browser:
        page = await submit(browser, "ada")
    assert page.status_code == status
    assert text in page.text
    assert world.stacks[0].is_closed
    assert (world.sign_in.results[result], len(world.sessions)) == (1, 0)


@pytest.mark.parametrize(
    "target",
    ["https://evil.example", "//evil.example", "/\\evil.example", "/\t/evil.example", "\\\\evil", "evil", ""],
)
async def test_signing_in_never_leads_to_another_site(target: str) -> None:
    world = ConsoleWorld(seal("ada"))
    async with world.browser() as browser:
        response = await submit(browser, "ada", next=target)
        assert response.headers["location"] == "/"
        again = await browser.get("/sign-in", params={"next": target})
        assert again.headers["location"] == "/"


async def test_a_form_of_another_site_signs_nobody_in() -> None:
    world = ConsoleWorld(seal("ada"))
    form = {"name": "ada", "password": PASSWORD}
    async with world.browser() as browser:
        assert (await browser.post("/sign-in", data=form)).status_code == 403
        await browser.get("/sign-in")
        assert (await browser.post("/sign-in", data={**form, "csrf": "guessed"})).status_code == 403
    async with world.browser(origin="https://evil.example") as browser:
        assert (await submit(browser, "ada")).status_code == 403
    assert len(world.sessions) == 0


async def test_a_form_that_is_too_large_is_refused_before_it_is_read() -> None:
    world = ConsoleWorld(seal("ada"))
    async with world.browser() as browser:
        page = await submit(browser, "ada", "x" * 100_000)
    assert page.status_code == 413
    assert world.sign_in.results["wrong"] == 0


async def test_signing_out_ends_the_session_and_needs_the_token_of_a_page() -> None:
    world = ConsoleWorld(seal("ada"))
    async with world.browser() as browser:
        await submit(browser, "ada")
        [session] = world.sessions._sessions.values()
        assert (await browser.post("/sign-out", data={"csrf": "guessed"})).status_code == 403
        assert not session.is_over
        assert (await browser.post("/sign-out", data={"csrf": session.csrf})).status_code == 303
        assert session.is_over
        page = await browser.get("/?a=1")
        assert page.headers["location"] == "/sign-in?next=/%3Fa%3D1"


# By a header.


@pytest.fixture
def trusting(tmp_path: Path) -> ConsoleWorld:
    for role in (Role.VIEW, Role.ADMIN):
        text = encode_plain_user(PlainUser(user=role.value, password="p"))
        (tmp_path / role.value).write_text(text)
    return ConsoleWorld(
        seal("ada"),
        TRUSTED_HEADER="X-Forwarded-User",
        TRUSTED_FROM="10.0.0.0/8, fd00::/8",
        ROLE_HEADER="X-Forwarded-Role",
        VIEW_CREDS_FILE=str(tmp_path / "view"),
        ADMIN_CREDS_FILE=str(tmp_path / "admin"),
    )


@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::1%eth0"])
async def test_a_trusted_proxy_names_the_person_and_the_role(trusting: ConsoleWorld, address: str) -> None:
    headers = {"X-Forwarded-User": "ada@example.org", "X-Forwarded-Role": "admin"}
    async with trusting.browser(address) as browser:
        pages = await asyncio.gather(*(browser.get("/", headers=headers) for _ in range(5)))
        assert {page.status_code for page in pages} == {200}
        [session] = trusting.sessions._sessions.values()
        assert (session.person.name, session.role) == ("ada@example.org", Role.ADMIN)
        assert trusting.stacks[0].address.role is Role.ADMIN
        await browser.get("/", headers={"X-Forwarded-User": "ada@example.org"})
    assert {each.role for each in trusting.sessions._sessions.values()} == {Role.ADMIN, Role.VIEW}


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("192.0.2.1", {"X-Forwarded-User": "ada"}),
        ("", {"X-Forwarded-User": "ada"}),
        ("10.0.0.1", {}),
        ("10.0.0.1", {"X-Forwarded-User": "no name"}),
        ("10.0.0.1", {"X-Forwarded-User": "ada", "X-Forwarded-Role": "operate"}),
        ("10.0.0.1", {"X-Forwarded-User": "ada", "X-Forwarded-Role": "controller"}),
    ],
)
async def test_headers_of_others_unknown_roles_and_bad_names_sign_nobody_in(
    trusting: ConsoleWorld, address: str, headers: dict[str, str]
) -> None:
    async with trusting.browser(address) as browser:
        page = await browser.get("/", headers=headers)
    assert (page.status_code, page.headers["location"]) == (303, "/sign-in")
    assert len(trusting.sessions) == 0


async def test_credentials_that_cannot_be_read_are_an_error_page(
    trusting: ConsoleWorld, tmp_path: Path
) -> None:
    (tmp_path / "view").unlink()
    async with trusting.browser("10.0.0.1") as browser:
        page = await browser.get("/", headers={"X-Forwarded-User": "ada"})
    assert page.status_code == 500
    assert "the file of the role view cannot be read" in page.text
    assert str(tmp_path) not in page.text
