"""Which responses to copies differ from the caller's, outside of what is known to vary. Pure.

Ids, timestamps and the like differ in every response. They are learned from the *baseline*, the old version that gets
the same copies: a path at which its responses often differ from the caller's varies by itself, and is left out. A
response is judged by what was learned before it came, and by that alone. So if both versions are equal then canary and
baseline differ with the same probability, whatever was learned so far: either could be the other. On that the error
probabilities of the rollout's gate rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import msgspec

from serve_common.replay.differences import (
    DifferenceKey,
    DifferenceKind,
    Differences,
    ReplayedResponse,
    ResponseComparator,
    build_example,
)

WARM_UP: Final = 20
"""Comparisons that only teach."""
VARYING_SHARE: Final = 0.05
"""A path varies if the baseline differed there in more than this share of the comparisons so far.

Why not at the first difference: one response in a hundred that is off for the old version too would blind the
comparison to that path. Such noise is for the gate, which compares how often both differ.
"""
PATHS_MAX: Final = 1_000
"""Paths that are learned; differences at further ones count, for both versions."""
EXAMPLES_MAX: Final = 5
_SIDE_LENGTH_MAX: Final = 50
_PATH_LENGTH_MAX: Final = 100
_LEARNED_LENGTH_MAX: Final = 1_000
"""Longer paths are not learned: they are data."""


class ComparedResponses(msgspec.Struct, frozen=True):
    """What one comparison came to."""

    is_canary_different: bool
    is_baseline_different: bool


@final
class VaryingPaths:
    """Compares the responses of a canary and its baseline with those that callers got, and learns what varies."""

    def __init__(self, tolerance: float, ignored: Iterable[str] = ()) -> None:
        """Arguments and errors as of `ResponseComparator`."""
        self._comparator = ResponseComparator(tolerance, ignored)
        self._comparisons = 0
        self._differing: dict[DifferenceKey, int] = {}
        self._examples: dict[DifferenceKey, str] = {}

    def compare(
        self, caller: ReplayedResponse, canary: ReplayedResponse, baseline: ReplayedResponse
    ) -> ComparedResponses | None:
        """Compare the responses to one request; None while that only teaches."""
        noise, found = self._comparator.compare(caller, baseline), self._comparator.compare(caller, canary)
        compared = None
        if self._comparisons >= WARM_UP:
            new = [key for key in found if not self.varies(key)]
            compared = ComparedResponses(bool(new), not all(map(self.varies, noise)))
            self._add_examples(new, found)
        self._learn(noise)
        return compared

    def varies(self, key: DifferenceKey) -> bool:
        """Whether a path is known to vary."""
        return self._differing.get(key, 0) > VARYING_SHARE * self._comparisons

    def examples(self) -> list[str]:
        """Texts about some paths at which the canary differs, such as ``$.label: 3 instead of 8``."""
        return [text for key, text in self._examples.items() if not self.varies(key)]

    def _learn(self, noise: Differences) -> None:
        self._comparisons += 1
        for key in noise:
            is_new = key not in self._differing
            if is_new and (len(self._differing) >= PATHS_MAX or len(key.path) > _LEARNED_LENGTH_MAX):
                continue
            self._differing[key] = self._differing.get(key, 0) + 1

    def _add_examples(self, new: list[DifferenceKey], found: Differences) -> None:
        for key in new:
            if key in self._examples:
                continue
            if len(self._examples) >= EXAMPLES_MAX:
                varying = next((former for former in self._examples if self.varies(former)), None)
                if varying is None:
                    return
                del self._examples[varying]
            self._examples[key] = _describe(key, found)


def _describe(key: DifferenceKey, found: Differences) -> str:
    path = _cut(key.path, _PATH_LENGTH_MAX)
    example = build_example(found[key])
    old, new = _cut(example.old, _SIDE_LENGTH_MAX), _cut(example.new, _SIDE_LENGTH_MAX)
    match key.kind:
        case DifferenceKind.MISSING:
            return f"{path} is missing; it was {old}"
        case DifferenceKind.ADDED:
            return f"{path} is new: {new}"
        case DifferenceKind.LENGTH:
            return f"{path}: {new} elements instead of {old}"
        case DifferenceKind.MEMBERS:
            return f"{path}: other members, {new} instead of {old}"
        case _:
            return f"{path}: {new} instead of {old}"


def _cut(text: str, length: int) -> str:
    # Terminals obey some characters, and lone surrogates cannot be sent.
    text = "".join(each if each.isprintable() else "?" for each in text[: length + 1])
    return text if len(text) <= length else f"{text[: length - 1]}…"
