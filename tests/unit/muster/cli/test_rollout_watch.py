"""What `muster rollout watch` shows of differing answers."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from muster.cli.rollouts import _drawn, _line
from serve_common.api.rollout_views import DifferencesView
from tests.unit.muster.cli.test_commands import ROLLOUT

DIFFERENCES = DifferencesView(
    compared=1_812, different=31, baseline_different=2, examples=["$.label: 3 instead of 8"]
)


def drawn(differences: DifferencesView | None) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(_drawn(msgspec.structs.replace(ROLLOUT, differences=differences)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_differences_are_shown_with_examples() -> None:
    assert "31 of 1,812 compared answers differ; baseline: 2" in drawn(DIFFERENCES)
    assert "    $.label: 3 instead of 8" in drawn(DIFFERENCES)
    assert "compared answers" not in drawn(None)


def test_the_last_line_of_an_aborted_one_has_them_too() -> None:
    ended = msgspec.structs.replace(ROLLOUT, outcome="aborted", differences=DIFFERENCES)
    assert _line(ended).endswith("errors: 0 of 80 failed ($.label: 3 instead of 8)")
    assert "$.label" not in _line(msgspec.structs.replace(ended, outcome="promoted"))
