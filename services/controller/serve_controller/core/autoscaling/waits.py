"""How long what has been wanted: the memory behind the delays.

Why not one timer per direction: a timer that begins anew at every step down lets a falling load keep replicas for one
delay per step, and what is wanted in the moment when it is over may be a dip. So for every number of replicas it is
remembered since when fewer have been wanted; the number that may go down to is the largest one wanted during the
delay. That is the scale-down stabilization of Kubernetes' HorizontalPodAutoscaler (KEP-853, "pick the largest
recommendation of the window"), without keeping the window.
"""

from __future__ import annotations

from typing import Final

import msgspec

from serve_controller.core.autoscaling.values import ScalingState

Fewer = tuple[tuple[int, float], ...]
"""Entries (n, since), n falling and since rising: fewer than n, and so fewer than anything up to the n of the entry
before, have been wanted since then."""

FEWER_MAX: Final = 32


def note_wanted(fewer: Fewer, wanted: int, now: float) -> Fewer:
    """``fewer`` after ``wanted`` replicas were wanted at ``now``."""
    noted: list[tuple[int, float]] = []
    for than, since in fewer:
        if than <= wanted:
            if not noted or wanted + 1 < noted[-1][0]:
                noted.append((wanted + 1, since))
            break
        noted.append((than, since))
    else:
        if not noted or wanted + 1 < noted[-1][0]:
            noted.append((wanted + 1, now))
    while len(noted) > FEWER_MAX:
        # Its numbers fall to the next entry, which is younger: they wait longer, never shorter. Where entries are
        # closest that is least; the first one is what lets anything go at all.
        del noted[min(range(1, len(noted) - 1), key=lambda index: noted[index + 1][1] - noted[index - 1][1])]
    return tuple(noted)


def since_fewer_than(fewer: Fewer, num_replicas: int) -> float | None:
    """Since when fewer than ``num_replicas`` have been wanted without a break; None when they are not."""
    for than, since in fewer:
        if than <= num_replicas:
            return since
    return None


def largest_wanted(fewer: Fewer, now: float, delay_s: float) -> int | None:
    """The largest number wanted during the last ``delay_s``; None when that is not known for so long."""
    largest = None
    for than, since in fewer:
        if now - since < delay_s:
            break
        largest = than - 1
    return largest


def without_gap(state: ScalingState, now: float, gap_s: float) -> ScalingState:
    """``state`` as if the last ``gap_s`` had not been: what was not seen counts for no delay."""

    def moved(at: float | None) -> float | None:
        return None if at is None else min(at + gap_s, now)

    return msgspec.structs.replace(
        state,
        up_since=moved(state.up_since),
        fewer=tuple((than, min(since + gap_s, now)) for than, since in state.fewer),
    )
