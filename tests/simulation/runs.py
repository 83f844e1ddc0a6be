"""One run of one seed, from its story to the calm."""

from __future__ import annotations

import hashlib
import random
import traceback
from dataclasses import dataclass, replace

from serve_controller.shell.control_loop import Term
from tests.simulation.calm import check_converged, has_unheard_load, mending, why_not_calm
from tests.simulation.clients import Client, Step
from tests.simulation.stories import draw_story
from tests.simulation.weather import brew, brew_forger, brew_hang, draw_faults, move_load
from tests.simulation.world import Violated, World

CLIENTS_LIMIT_S = 240.0
CALM_LIMIT_S = 120.0
SETTLE_S = 1.5
MENDINGS_MAX = 5
GOALS_LIMIT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    seed: int
    violations: list[str]
    trace: list[str]
    virtual_s: float
    mishaps: tuple[str, ...] = ()
    effects: int = 0
    asked: int = 0
    """How often a plan of everything was compared."""
    crashed: tuple[tuple[int, str, bool], ...] = ()
    """Number and name of each effect that was crashed at, and whether after it."""

    @property
    def name(self) -> str:
        """Which run it was."""
        crashes = [f"{'after' if after else 'before'} effect {n}" for n, _, after in self.crashed]
        return f"seed {self.seed} ({', '.join([*self.mishaps, *crashes]) or 'no mishap'})"

    def without_trace(self) -> Outcome:
        """The same, smaller."""
        return replace(self, trace=[])

    @property
    def digest(self) -> str:
        """Equal for equal traces."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


def run_seed(seed: int, term_class: type[Term] = Term) -> Outcome:
    """Draw a story and a storm from the seed, play both, and demand the calm."""
    dice = random.Random(f"story {seed}")
    points = dice.choice([0, 0, 1, 2, 3])
    crashes = frozenset((dice.randrange(160), dice.random() < 0.5) for _ in range(points))
    storm_s = dice.uniform(3.0, 16.0) if dice.random() < 0.9 else 35.0
    world = World(
        seed=seed,
        faults=draw_faults(dice),
        crashes=crashes,
        term_class=term_class,
        controllers=dice.choice([1, 1, 2, 3]),
    )
    mishaps = tuple(brew(world, dice, storm_s))
    move_load(world, dice, storm_s)
    stories = [draw_story(dice, f"client-{n}") for n in range(1, dice.choice([1, 2, 3]) + 1)]
    storm_s = brew_hang(world, random.Random(f"hang {seed}"), storm_s, mishaps)
    brew_forger(world, random.Random(f"forger {seed}"), mishaps, storm_s)
    return play(world, stories, storm_s, (*mishaps, "bus hangs", "somebody forges"))


def play(
    world: World, stories: list[list[Step]], storm_s: float = 0.0, mishaps: tuple[str, ...] = ()
) -> Outcome:
    """Let clients do their steps in a world, and what must hold be looked at until the calm."""
    begun = world.time
    try:
        world.clients = [Client(world, f"client-{n}", steps) for n, steps in enumerate(stories, 1)]
        world.run_until(lambda: False, storm_s)
        world.calm() if storm_s else None
        _wait(world, lambda: "" if all(x.is_done for x in world.clients) else "clients wait", CLIENTS_LIMIT_S)
        world.calm()
        _wait(world, lambda: "" if world.time > world.stale_until else "messages are under way", CALM_LIMIT_S)
        for number in range(MENDINGS_MAX):
            # A goal that is under way may yet fail, and bring back what must be mended.
            world.run_until(
                lambda: not world.store.checkpoint.pending and not has_unheard_load(world), GOALS_LIMIT_S
            )
            steps = mending(world)
            if not steps:
                break
            world.clients.append(Client(world, f"mender-{number}", steps))
            _wait(world, lambda: "" if world.clients[-1].is_done else "the mender waits", CLIENTS_LIMIT_S)
        _wait(world, lambda: why_not_calm(world), CALM_LIMIT_S)
        world.run_until(lambda: False, SETTLE_S)
        check_converged(world)
        for controller in world.controllers:
            if controller.term is not None:
                world.checks.attention.ask(controller.term)
    except Violated:
        pass
    except Exception:
        world.violations.append(f"something broke: {traceback.format_exc()}")
    return Outcome(
        world.seed,
        world.violations,
        world.traced,
        world.time - begun,
        mishaps,
        world.crashes.count,
        world.checks.attention.asked,
        tuple(world.crashes.fired),
    )


def _wait(world: World, why_not: object, limit_s: float) -> None:
    reason = ["not looked at"]

    def look() -> None:
        reason[0] = why_not()  # type: ignore[operator]
        if reason[0]:
            world.after(0.2, look)

    look()
    world.run_until(lambda: not reason[0], limit_s)
    world.check(not reason[0], lambda: f"within {limit_s:g} s of calm it did not settle: {reason[0]}")
