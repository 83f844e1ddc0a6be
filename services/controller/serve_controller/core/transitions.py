"""The life cycle of a replica, as one table.

A replica's *state* is what was decided (durable); its host's report is what was observed. A state changes only by one
of the events below, and everything that affects a replica's life cycle is in this file. A replica's number is never
reused: one that is gone is replaced by a new one, so no transition leads backwards.

::

    SHOULD_START --placed--> STARTING --heard_running--> RUNNING <--heard_config-- UPDATING
                                                         RUNNING --reconfigure--> UPDATING
    RUNNING, UPDATING --heard_unhealthy--> UNHEALTHY --heard_running--> RUNNING
    any that is wanted --unwanted--> SHOULD_STOP --acknowledged--> STOPPING
    any --gone--> STOPPED (the row is deleted)
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from serve_controller.core.objects import ReplicaState as S


class TransitionEvent(Enum):
    """Events in the life cycle of a replica."""

    PLACED = "placed"
    """A host was chosen."""
    REPORTED_RUNNING = "heard_running"
    """Its host reports it running and healthy."""
    REPORTED_UNHEALTHY = "heard_unhealthy"
    REPORTED_CONFIG = "heard_config"
    """Its host reports that the newest configuration is applied."""
    RECONFIGURE = "reconfigure"
    """A newer configuration was decided."""
    UNWANTED = "unwanted"
    """It should stop."""
    ACKNOWLEDGED = "acknowledged"
    """Its host has received the goal without it."""
    GONE = "gone"
    """Its process does not exist."""


TRANSITIONS: Final[dict[S, dict[TransitionEvent, S]]] = {
    S.SHOULD_START: {
        TransitionEvent.PLACED: S.STARTING,
        TransitionEvent.UNWANTED: S.SHOULD_STOP,
        TransitionEvent.GONE: S.STOPPED,
    },
    S.STARTING: {
        TransitionEvent.REPORTED_RUNNING: S.RUNNING,
        TransitionEvent.UNWANTED: S.SHOULD_STOP,
        TransitionEvent.GONE: S.STOPPED,
    },
    S.RUNNING: {
        TransitionEvent.RECONFIGURE: S.UPDATING,
        TransitionEvent.REPORTED_UNHEALTHY: S.UNHEALTHY,
        TransitionEvent.UNWANTED: S.SHOULD_STOP,
        TransitionEvent.GONE: S.STOPPED,
    },
    S.UPDATING: {
        TransitionEvent.RECONFIGURE: S.UPDATING,
        TransitionEvent.REPORTED_CONFIG: S.RUNNING,
        TransitionEvent.REPORTED_UNHEALTHY: S.UNHEALTHY,
        TransitionEvent.UNWANTED: S.SHOULD_STOP,
        TransitionEvent.GONE: S.STOPPED,
    },
    S.UNHEALTHY: {
        TransitionEvent.REPORTED_RUNNING: S.RUNNING,
        TransitionEvent.UNWANTED: S.SHOULD_STOP,
        TransitionEvent.GONE: S.STOPPED,
    },
    S.SHOULD_STOP: {
        TransitionEvent.ACKNOWLEDGED: S.STOPPING,
        TransitionEvent.GONE: S.STOPPED,
    },
    S.STOPPING: {
        TransitionEvent.GONE: S.STOPPED,
    },
    S.STOPPED: {},
}

WANTED: Final = frozenset({S.SHOULD_START, S.STARTING, S.RUNNING, S.UPDATING, S.UNHEALTHY})
"""Counts towards the number that should run."""
ROUTED: Final = frozenset({S.RUNNING, S.UPDATING})
"""Is sent new requests."""
IN_HOST_GOAL: Final = frozenset({S.STARTING, S.RUNNING, S.UPDATING, S.UNHEALTHY})
"""Is in its host's goal."""
DRAINING: Final = frozenset({S.UNHEALTHY, S.SHOULD_STOP, S.STOPPING})
"""Is sent no new requests and may still finish those it has."""


class IllegalTransition(AssertionError):
    """A programming error: an event that is not allowed in this state. Nothing was changed."""


def moved(state: S, event: TransitionEvent) -> S:
    """The state after ``event``; raises `IllegalTransition` when the table has no such transition."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"{event.value} cannot happen in {state.value}") from None
