"""Configuration of rollouts: the steps by which a new version takes over traffic, and what must hold at each."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

import msgspec

from serve_common.config.external_gates import ExternalGate, check_external_gates
from serve_common.errors import BadField
from serve_common.replay.differences import check_ignored_path
from serve_common.values import check_between

STEPS_MAX: Final = 20
IGNORED_PATHS_MAX: Final = 50
DEFAULT_STEPS: Final = ("5% 30s", "25% 30s", "50% 30s", "100%")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_STEP: Final = re.compile(
    r"(?P<shadow>shadow\s+)?(?P<percent>[0-9]{1,3}(?:\.[0-9]{1,4})?)%"
    r"(?:\s+(?P<amount>[0-9]{1,6}(?:\.[0-9]{1,3})?)(?P<unit>[smhd]))?(?P<waits>\s+wait)?"
)


class RolloutStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a rollout."""

    share: float
    """Share of the requests that the new version gets, 0 to 1."""
    is_shadow: bool = False
    """It gets copies, and its responses are dropped."""
    hold_s: float = 0.0
    """Seconds that the step lasts at least."""
    waits: bool = False
    """Whether a person, or a program, must let it go on."""

    def __str__(self) -> str:
        parts = ["shadow"] if self.is_shadow else []
        parts.append(f"{self.share * 100:g}%")
        if self.hold_s:
            parts.append(f"{self.hold_s:g}s")
        return " ".join([*parts, "wait"] if self.waits else parts)


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a new version takes over traffic.

    At each step it is compared with a *baseline*: as many replicas of the old version, as young, with as many requests.
    A step passes when the requests have shown that the new version is no worse than the limits below, and the rollout
    is aborted when they have shown that it is worse than the baseline. Until either it stays where it is.
    """

    steps: tuple[str, ...] = DEFAULT_STEPS
    """``[shadow] N% [DURATION] [wait]``: share of the requests, least duration (``30s``, ``5m``, ``1h``), and ``wait``
    where a person must let it go on. Shares rise; shadow steps come first, and the last step is 100%."""
    max_error_increase: float = 0.01
    """A step passes once the share of failed requests (status 500 and above, or no response) has been shown to exceed
    the baseline's by less than this."""
    max_client_error_increase: float = 0.02
    """The same for responses with a status of 400 to 499."""
    max_latency_ratio: float = 1.5
    """A step passes once median and 99th percentile of the time to the end of a response have been shown to be less
    than this many times the baseline's."""
    max_difference_increase: float | None = None
    """In shadow steps, where responses to copies are compared with the one that the caller got: a step passes once the
    share of different ones has been shown to exceed the baseline's by less than this, and the rollout is aborted once
    it has been shown to exceed it by more. None: differences are shown, and judge nothing."""
    ignored_paths: tuple[str, ...] = ()
    """What is not compared: JSON paths, such as ``$.confidence``, with all below them, or ``status``, ``content-type``
    or ``body``. At most 50."""
    difference_tolerance: float = 1e-6
    """Numbers in JSON are equal when they differ by at most this, absolutely or relative to the larger one; two
    integers only when they are the same."""
    replays_captures: bool = False
    """Whether captured requests of the deployment's endpoints are sent to them again in shadow steps, ten a second,
    until it has shown all that it must: where there is too little traffic. Only GET, HEAD and OPTIONS."""
    replays_all_methods: bool = False
    """Whether captured requests of other methods are sent again too: they then run once more in the old version."""
    max_replica_failures: int = 2
    """Replicas of the new version that may die or fall ill in the rollout, beyond as many of the baseline."""
    gates: tuple[ExternalGate, ...] = ()
    """What else must hold: queries, webhooks and NATS subjects that are asked at each step. At most 10."""
    false_abort_probability: float = 0.005
    """Probability, at most, that a version as good as the old one is aborted by its requests."""
    false_pass_probability: float = 0.05
    """Probability, at most, that a version beyond one of the limits passes a step."""
    deadline_s: float = 86_400.0
    """Seconds after which a rollout that has not been promoted is aborted."""
    cool_down_s: float = 3600.0
    """Seconds after an abort in which the same version is refused, unless it is started with ``again``."""
    keeps_failed: bool = False
    """Whether the replicas of an aborted version are kept, without traffic, for looking at."""


def parse_steps(steps: tuple[str, ...], field: str = "rollout.steps") -> tuple[RolloutStep, ...]:
    """The steps of a rollout. Raises `BadField` for one that cannot be read, or that does not fit the one before."""
    if not 0 < len(steps) <= STEPS_MAX:
        raise BadField(field, f"has {len(steps)} steps; it must have 1 to {STEPS_MAX}")
    parsed = tuple(_parse_step(text, f"{field}[{at}]") for at, text in enumerate(steps))
    for at, (former, step) in enumerate(pairwise(parsed), start=1):
        if step.is_shadow and not former.is_shadow:
            raise BadField(
                f"{field}[{at}]", "is a shadow step after one with traffic; shadow steps come first"
            )
        if step.is_shadow == former.is_shadow and step.share <= former.share:
            raise BadField(f"{field}[{at}]", f"is {step.share * 100:g}%; shares must rise")
    if parsed[-1].is_shadow or parsed[-1].share != 1:
        raise BadField(field, "must end with 100%: then the new version takes the place of the old one")
    return parsed


def _parse_step(text: str, field: str) -> RolloutStep:
    found = _STEP.fullmatch(text.strip())
    if found is None:
        raise BadField(
            field,
            f"{text[:80]!r} must read [shadow] N% [DURATION] [wait], such as '5% 30s' or 'shadow 100% 1m'",
        )
    share = float(found["percent"]) / 100
    if not 0 < share <= 1:
        raise BadField(field, f"is {found['percent']}%; it must be above 0 and at most 100")
    hold_s = float(found["amount"] or 0) * _SECONDS[found["unit"] or "s"]
    check_between(hold_s, 0, 30 * 86_400, field)
    return RolloutStep(
        share=share, is_shadow=bool(found["shadow"]), hold_s=hold_s, waits=bool(found["waits"])
    )


def check_rollout_config(config: RolloutConfig, field: str = "rollout") -> RolloutConfig:
    """Return ``config`` when every field is within its limits; otherwise raise `BadField` with the field's path."""
    steps = parse_steps(config.steps, f"{field}.steps")
    check_between(config.max_error_increase, 0.0001, 0.5, f"{field}.max_error_increase")
    check_between(config.max_client_error_increase, 0.0001, 0.5, f"{field}.max_client_error_increase")
    check_between(config.max_latency_ratio, 1.1, 100, f"{field}.max_latency_ratio")
    if config.max_difference_increase is not None:
        check_between(config.max_difference_increase, 0.0001, 0.5, f"{field}.max_difference_increase")
        if not steps[0].is_shadow:
            raise BadField(
                f"{field}.max_difference_increase",
                "needs a shadow step: only responses to copies are compared",
            )
    if config.replays_captures and config.max_difference_increase is None:
        raise BadField(f"{field}.replays_captures", "needs max_difference_increase, which says for how long")
    if config.replays_all_methods and not config.replays_captures:
        raise BadField(f"{field}.replays_all_methods", "needs replays_captures")
    if len(config.ignored_paths) > IGNORED_PATHS_MAX:
        raise BadField(
            f"{field}.ignored_paths", f"has {len(config.ignored_paths)} paths; at most {IGNORED_PATHS_MAX}"
        )
    for at, path in enumerate(config.ignored_paths):
        check_ignored_path(path, f"{field}.ignored_paths[{at}]")
    check_between(config.difference_tolerance, 0, 1, f"{field}.difference_tolerance")
    check_between(config.max_replica_failures, 0, 1000, f"{field}.max_replica_failures")
    check_external_gates(config.gates, f"{field}.gates")
    check_between(config.false_abort_probability, 1e-9, 0.5, f"{field}.false_abort_probability")
    check_between(config.false_pass_probability, 1e-9, 0.5, f"{field}.false_pass_probability")
    check_between(config.deadline_s, 1, 90 * 86_400, f"{field}.deadline_s")
    check_between(config.cool_down_s, 0, 90 * 86_400, f"{field}.cool_down_s")
    return config
