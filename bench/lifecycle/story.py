"""The changes that every system goes through, and what is noted of them.

Why only the standard library: Ray Serve is measured by a Python of its own, in which nothing of Muster is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLICAS = 8
REPLICA_CPUS = 0.1
"""Of one replica or bare actor: all versions of all replicas fit on two CPUs at once."""
SETTLE_S = 5.0
"""Default pause between two changes: what still stops of one, or is made ready for the next, is over by then."""
CHANGE_TIMEOUT_S = 120.0

FIRST_DEPLOY = "first deploy"
REDEPLOY = "redeploy"
SCALE_UP = f"1 → {REPLICAS} replicas"
ROLL = f"rolling update of {REPLICAS}"
DELETE = f"delete of {REPLICAS}"


@dataclass(frozen=True)
class Change:
    """What is asked for. ``version`` None: that the deployment goes away."""

    step: str
    version: str | None
    num_replicas: int = 1


WARM_UP = (Change("warm-up", "v0"), Change("warm-up", None))
"""Not noted: brings everything up that a first change of all pays for once."""
STORY = (
    Change(FIRST_DEPLOY, "v1"),
    Change(REDEPLOY, "v2"),
    Change(SCALE_UP, "v2", REPLICAS),
    Change(ROLL, "v3", REPLICAS),
    Change(DELETE, None),
)


@dataclass(frozen=True)
class Taken:
    """How long one change took."""

    step: str
    done_s: float
    """From the call until the system said that it is done."""
    answered_s: float | None
    """From the call to the first HTTP answer of the new version, or to the first 404; None: nothing new to see."""


@dataclass(frozen=True)
class SystemRound:
    """One fresh system, warmed up, that went through the story once."""

    taken: list[Taken]
    requests: int
    """That were sent while the deployment was to serve (from its first answer until its deletion)."""
    requests_failed: int
    """Of those, how many got no 200."""


@dataclass(frozen=True)
class BareRound:
    """The same actors by nothing but Ray, in the same state of its pool of processes."""

    first_s: float
    """One actor in a warm Ray; a process may wait for it already."""
    another_s: float
    """One more."""
    eight_s: float
    """`REPLICAS` at once."""
