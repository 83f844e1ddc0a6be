"""What the simulated controllers log is of no interest by the thousand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.sweeps import quiet


@pytest.fixture(autouse=True, scope="module")
def _quiet_logs() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()
