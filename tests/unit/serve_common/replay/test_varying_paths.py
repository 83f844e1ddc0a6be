"""What differs beyond what varies by itself: learned from the baseline, before a response is judged."""

from __future__ import annotations

import json
import random

from serve_common.replay.differences import ReplayedResponse
from serve_common.replay.varying_paths import (
    EXAMPLES_MAX,
    PATHS_MAX,
    WARM_UP,
    ComparedResponses,
    VaryingPaths,
)

SAME, NEW = ComparedResponses(False, False), ComparedResponses(True, False)
TOLERANCE = 1e-6


def response(status: int = 200, **fields: object) -> ReplayedResponse:
    return ReplayedResponse(status=status, content_type="application/json", body=json.dumps(fields).encode())


class Versions:
    """Responses with random ids and times."""

    def __init__(self) -> None:
        self.paths = VaryingPaths(TOLERANCE)
        self.rng = random.Random(1)

    def noisy(self, **fields: object) -> ReplayedResponse:
        return response(id=self.rng.getrandbits(64), at=[{"s": self.rng.random()}], **fields)

    def compare(self, canary: dict[str, object], baseline: dict[str, object], **caller: object):
        return self.paths.compare(self.noisy(**caller), self.noisy(**canary), self.noisy(**baseline))

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            assert self.compare({"label": 8}, {"label": 8}, label=8) is None


def test_ids_and_times_are_learned_and_a_wrong_label_is_found() -> None:
    versions = Versions()
    versions.warm_up()
    assert versions.compare({"label": 8}, {"label": 8}, label=8) == SAME
    assert versions.compare({"label": 3}, {"label": 8}, label=8) == NEW
    assert versions.paths.examples() == ["$.label: 3 instead of 8"]


def test_canary_and_baseline_are_judged_alike() -> None:
    versions = Versions()
    versions.warm_up()
    for _ in range(2):
        assert versions.compare({"label": 8}, {"label": 3}, label=8) == ComparedResponses(False, True)
    both = versions.compare({"label": 8}, {"label": 8}, label=3)
    assert both == ComparedResponses(False, False), "it is known to vary by now, for both"


def test_a_path_is_learned_after_its_request_was_judged() -> None:
    versions = Versions()
    versions.warm_up()
    first = versions.compare({"label": 8}, {"label": 8}, label=3)
    assert first == ComparedResponses(True, True)


def test_what_varies_seldom_does_not_hide_a_path_for_good() -> None:
    versions = Versions()
    versions.warm_up()
    for _ in range(2):
        versions.compare({"label": 8}, {"label": 3}, label=8)
    assert versions.compare({"label": 3}, {"label": 8}, label=8) == SAME
    for _ in range(100):
        versions.compare({"label": 8}, {"label": 8}, label=8)
    assert versions.compare({"label": 3}, {"label": 8}, label=8) == NEW


def test_another_kind_of_difference_shows_where_values_vary() -> None:
    versions = Versions()
    versions.warm_up()
    caller, old, new = versions.noisy(), versions.noisy(), response(at=[{"s": 0.5}])
    assert versions.paths.compare(caller, new, old) == NEW
    assert versions.paths.examples()[0].startswith("$.id is missing; it was ")


def test_statuses_and_bodies_that_are_no_json_are_compared() -> None:
    versions = Versions()
    versions.warm_up()
    plain = [ReplayedResponse(status=200, body=text) for text in (b"one", b"one", b"two")]
    assert versions.paths.compare(plain[0], plain[2], plain[1]) == NEW
    assert versions.paths.compare(response(), response(503), response()) == NEW
    assert versions.paths.examples() == [
        "body: 3 bytes: b'two' instead of 3 bytes: b'one'",
        "status: 503 instead of 200",
    ]


def test_numbers_are_equal_within_the_tolerance() -> None:
    versions = Versions()
    versions.warm_up()
    assert versions.compare({"score": 0.1 + 1e-9}, {"score": 0.1}, score=0.1) == SAME
    assert versions.compare({"score": 0.11}, {"score": 0.1}, score=0.1) == NEW


def test_memory_has_limits() -> None:
    versions = Versions()
    versions.warm_up()
    wide: dict[str, object] = {"x": {str(at): {"y": 1} for at in range(PATHS_MAX)}}
    for start in range(0, PATHS_MAX, 100):
        other = {"x": {str(at): {"y": 2 if start <= at < start + 100 else 1} for at in range(PATHS_MAX)}}
        versions.compare(wide, other, **wide)
        versions.compare({**wide, "k" * 2_000: 1}, {**wide, f"k{start}" * 500: 1}, **wide)
    assert len(versions.paths._differing) <= PATHS_MAX
    assert max(len(key.path) for key in versions.paths._differing) < 1_000
    hostile = {f"a{at}\x1b[31m\ud800": "x\ud800" * 500 for at in range(100)}
    versions.compare(hostile, {}, **dict.fromkeys(hostile, "y"))
    examples = versions.paths.examples()
    assert len(examples) <= EXAMPLES_MAX
    for text in examples:
        assert len(text.encode()) <= 600
        assert len(text) <= 256
        assert text.isprintable()


def test_what_is_ignored_counts_for_neither() -> None:
    paths = VaryingPaths(TOLERANCE, ["$.confidence", "status"])
    for _ in range(WARM_UP):
        paths.compare(response(digit=8, confidence=0.5), response(digit=8, confidence=0.4), response(digit=8))
    old, new = response(digit=8, confidence=0.5), response(503, digit=8, confidence=0.9)
    assert paths.compare(old, new, old) == SAME
    assert paths.compare(old, response(digit=3, confidence=0.9), old) == NEW
    assert paths.examples() == ["$.digit: 3 instead of 8"]
