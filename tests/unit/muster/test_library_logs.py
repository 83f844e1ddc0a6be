"""Muster's log lines within a program: silent, unless the program listens."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, structlog
{first}
from muster.library_logs import use_library_logs
log = structlog.get_logger("serve_common.nats")
use_library_logs()
use_library_logs()
log.warning("nats_away", error="gone")
try:
    raise ValueError("three")
except ValueError:
    log.exception("failed")
"""


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("", ""),
        ("logging.basicConfig(format='%(name)s %(message)s %(error)s', level='WARNING')", "nats_away gone"),
        (
            "structlog.configure(logger_factory=structlog.PrintLoggerFactory(__import__('sys').stderr))",
            "nats_away",
        ),
    ],
    ids=["silent", "listens", "its own"],
)
def test_a_library_is_silent_unless_its_program_listens(first: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == ""
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
