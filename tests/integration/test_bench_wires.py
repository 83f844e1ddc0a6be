"""The bench of wires still runs; what it measures on a busy machine is not judged here."""

from __future__ import annotations

import pytest

from tests.bench.wires import run

pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(180)]


async def test_the_bench_of_wires_prints_a_line_for_each_wire(capsys: pytest.CaptureFixture[str]) -> None:
    await run(["nats-py", "bus"], [2], rounds=1, seconds=0.05, payload_bytes=16)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.endswith("x")]
    assert [row[:2] for row in rows] == [["2", "nats-py"], ["2", "bus"]]
    assert all(float(cell) >= 0 for row in rows for cell in row[2:6]), "a number, rounded"
