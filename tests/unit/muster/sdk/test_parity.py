"""What tests/parity recorded under Ray Serve can be repeated anywhere; here it is the same where no stack is needed."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.parity import programs_of

WITHOUT_STACK = ("config_errors", "config_models", "deployment_attributes", "local_testing", "schema_models")


def test_what_is_recorded_is_of_programs_that_are_there_and_printed_something() -> None:
    recorded = programs_of.recorded()
    assert set(WITHOUT_STACK) <= set(recorded) <= set(programs_of.names())
    assert not [name for name, lines in recorded.items() if not lines]


def test_what_is_recorded_names_no_machine() -> None:
    lines = [line for lines in programs_of.recorded().values() for line in lines]
    assert not [line for line in lines if programs_of.is_unrepeatable(line)]


@pytest.mark.parametrize("line", ["EXIT 1", "at /tmp/x/y.py", "InvalidAuthToken", "pid=12", "10.0.0.1:80"])
def test_a_failure_or_what_belongs_to_one_machine_is_not_recorded(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs_of, "RECORDED", tmp_path / "recorded.json")
    programs_of.record("quickstart", [line])
    assert programs_of.recorded() == {}
    programs_of.record("quickstart", ["http://127.0.0.1:8000/"])
    assert programs_of.recorded() == {"quickstart": ["http://127.0.0.1:8000/"]}


def test_programs_that_need_no_stack_print_what_they_print_under_ray_serve(tmp_path: Path) -> None:
    def run(name: str) -> list[str]:
        program = tmp_path / f"{name}.py"
        program.write_text(programs_of.for_muster((programs_of.PROGRAMS / program.name).read_text()))
        argv = [sys.executable, "-W", "ignore", program.name]
        return programs_of.run(argv, tmp_path, os.environ, 8000)

    with ThreadPoolExecutor(2) as pool:
        printed = dict(zip(WITHOUT_STACK, pool.map(run, WITHOUT_STACK), strict=True))
    recorded = programs_of.recorded()
    assert printed == {name: recorded[name] for name in WITHOUT_STACK}
