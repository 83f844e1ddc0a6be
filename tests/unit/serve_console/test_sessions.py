"""Sessions: how they end, and their limits; attempts to sign in."""

from __future__ import annotations

import pytest

from serve_common.errors import LimitReached
from serve_common.identities.roles import Role
from serve_console.core.attempts import Attempts
from serve_console.shell import sessions as sessions_module
from serve_console.shell.sessions import SESSIONS_OF_PERSON_MAX
from tests.support.console_world import ConsoleWorld


async def test_a_session_ends_when_it_was_not_used_for_long() -> None:
    world = ConsoleWorld()
    token, session = await world.start_session()
    world.clock.time += 90
    assert world.sessions.find(token) is session
    world.clock.time += 90
    assert world.sessions.find(token) is session
    world.clock.time += 101
    assert world.sessions.find(token) is None
    assert world.sessions.find_reader() is None
    await world.sessions.end_old()
    assert (session.is_over, world.stacks[0].is_closed, len(world.sessions)) == (True, True, 0)


async def test_a_session_ends_however_much_it_is_used() -> None:
    world = ConsoleWorld()
    token, _ = await world.start_session()
    for _ in range(20):
        world.clock.time += 50
        world.sessions.find(token)
    assert world.sessions.find(token) is not None
    world.clock.time += 50
    assert world.sessions.find(token) is None


async def test_another_password_and_removal_end_the_sessions_of_that_person_alone() -> None:
    world = ConsoleWorld()
    _, ada = await world.start_session("ada")
    _, bob = await world.start_session("bob")
    _, eve = await world.start_session("eve")
    await world.sessions.end_changed({"ada": ada.proof, "bob": "sealed anew"})
    assert [session.is_over for session in (ada, bob, eve)] == [False, True, True]


async def test_one_person_cannot_sign_the_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ConsoleWorld()
    for _ in range(SESSIONS_OF_PERSON_MAX):
        await world.start_session("ada")
    with pytest.raises(LimitReached, match="ada is signed in 20 times"):
        await world.start_session("ada")
    await world.start_session("bob")


async def test_beyond_the_limit_the_one_that_was_unused_for_longest_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 3)
    world = ConsoleWorld()
    tokens = []
    for number in range(3):
        tokens.append((await world.start_session(f"p{number}"))[0])
        world.clock.time += 1
    world.sessions.find(tokens[0])
    await world.start_session("p3")
    assert [world.sessions.find(token) is not None for token in tokens] == [True, False, True]


async def test_a_role_may_what_its_table_says() -> None:
    world = ConsoleWorld()
    _, viewer = await world.start_session("ada", Role.VIEW)
    _, operator = await world.start_session("bob", Role.OPERATE)
    _, admin = await world.start_session("eve", Role.ADMIN)
    assert [each.may("get_status") for each in (viewer, operator, admin)] == [True, True, True]
    assert [each.may("set_traffic") for each in (viewer, operator, admin)] == [False, True, True]
    assert [each.may("deploy") for each in (viewer, operator, admin)] == [False, False, True]
    assert [each.may_call for each in (viewer, operator, admin)] == [False, True, True]


def test_failures_cost_twice_as_long_each_time_up_to_a_limit() -> None:
    attempts = Attempts(free=2, longest_s=10.0)
    delays = []
    for _ in range(6):
        attempts.fail("ada", 100.0)
        delays.append(attempts.get_delay_s("ada", 100.0))
    assert delays == [0.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert attempts.get_delay_s("ada", 107.0) == 3.0
    assert attempts.get_delay_s("bob", 100.0) == 0.0


def test_failures_are_forgotten_after_success_or_long_silence() -> None:
    attempts = Attempts(free=1, longest_s=10.0)
    for _ in range(3):
        attempts.fail("ada", 0.0)
    attempts.fail("ada", 21.0)
    assert attempts.get_delay_s("ada", 21.0) == 2.0
    attempts.succeed("ada")
    assert attempts.get_delay_s("ada", 21.0) == 0.0


def test_names_without_end_are_not_retained() -> None:
    attempts = Attempts(free=1, longest_s=10.0)
    for number in range(10_100):
        attempts.fail(f"name {number}", 0.0)
    assert len(attempts._failures) == 10_000
    assert attempts.get_delay_s("name 0", 0.0) == 0.0
