"""Counts what came back, and judges whether a user of the service would be content.

Why every figure is bounded: the run may go on for days.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

ACCURACY_MIN = 0.95
REASONS_KEPT = 5  # distinct reasons for each kind of failure; further ones are only counted
REASON_CHARS_MAX = 200


class Latencies:
    """Durations in buckets 1 % apart, so that a run of any length needs a few kilobytes."""

    _GROWTH = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, duration_s: float) -> None:
        """Counts one duration."""
        self._buckets[math.floor(math.log(max(duration_s, 1e-6)) / self._GROWTH)] += 1

    def quantile_ms(self, share: float) -> float | None:
        """The duration that `share` (0..1) of all stay below, within 1 %; None without any."""
        rank = share * self._buckets.total()
        for bucket, seen in itertools.accumulate(
            sorted(self._buckets.items()), lambda before, item: (item[0], before[1] + item[1])
        ):
            if seen >= rank:
                return round(1000 * math.exp((bucket + 0.5) * self._GROWTH), 3)
        return None


@dataclass
class Tally:
    """What came back so far."""

    answered: int = 0
    correct: int = 0
    unsure: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    seconds: float = 0.0

    def answer(self, digit: int | str, label: int, duration_s: float) -> None:
        """Counts an answer, right or wrong."""
        self.answered += 1
        self.correct += digit == label
        self.unsure += digit == "unsure"
        self.latencies.add(duration_s)

    def failure(self, kind: str, reason: str) -> None:
        """Counts a request without a proper answer; `kind` is the HTTP status or what broke."""
        self.failures[kind] += 1
        seen = self.reasons.setdefault(kind, Counter())
        reason = reason.strip()[:REASON_CHARS_MAX]
        if reason in seen or len(seen) < REASONS_KEPT:
            seen[reason] += 1

    @property
    def accuracy(self) -> float:
        """Right answers among all answers; 0 when nothing was answered."""
        return self.correct / self.answered if self.answered else 0.0

    @property
    def passed(self) -> bool:
        """Whether a user of the service would be content."""
        return not self.failures.total() and self.accuracy >= ACCURACY_MIN

    def summary(self) -> dict[str, Any]:
        """All figures, as the one JSON object that `--json` prints."""
        requests = self.answered + self.failures.total()
        return {
            "requests": requests,
            "answered": self.answered,
            "correct": self.correct,
            "unsure": self.unsure,
            "accuracy": round(self.accuracy, 4),
            "failures": self.failures.total(),
            "failures_by_kind": {
                kind: {"count": count, "first_reasons": dict(self.reasons[kind])}
                for kind, count in self.failures.most_common()
            },
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(requests / self.seconds, 1) if self.seconds else 0.0,
            "p50_ms": self.latencies.quantile_ms(0.50),
            "p99_ms": self.latencies.quantile_ms(0.99),
            "passed": self.passed,
        }
