"""The one table of a replica's life."""

from __future__ import annotations

import pytest

from serve_controller.core.objects import ReplicaState
from serve_controller.core.transitions import (
    DRAINING,
    IN_HOST_GOAL,
    ROUTED,
    TRANSITIONS,
    WANTED,
    IllegalTransition,
    TransitionEvent,
    moved,
)


def test_every_state_has_its_moves_and_nothing_leaves_the_end() -> None:
    assert set(TRANSITIONS) == set(ReplicaState)
    assert TRANSITIONS[ReplicaState.STOPPED] == {}
    assert {event for moves in TRANSITIONS.values() for event in moves} == set(TransitionEvent)


@pytest.mark.parametrize("state", [state for state in ReplicaState if state is not ReplicaState.STOPPED])
def test_whatever_lives_can_be_gone(state: ReplicaState) -> None:
    assert moved(state, TransitionEvent.GONE) is ReplicaState.STOPPED


@pytest.mark.parametrize("state", sorted(WANTED, key=lambda s: s.value))
def test_whatever_is_wanted_can_be_unwanted_and_is_never_wanted_again(state: ReplicaState) -> None:
    stopping = moved(state, TransitionEvent.UNWANTED)
    found = {stopping}
    while True:
        more = found | {to for at in found for to in TRANSITIONS[at].values()}
        if more == found:
            break
        found = more
    assert not found & WANTED


def test_what_is_no_move_is_an_error_that_names_both() -> None:
    with pytest.raises(IllegalTransition, match="placed cannot happen in running"):
        moved(ReplicaState.RUNNING, TransitionEvent.PLACED)


def test_what_is_routed_runs_and_what_drains_is_not_routed() -> None:
    assert ROUTED <= IN_HOST_GOAL <= WANTED
    assert not ROUTED & DRAINING
