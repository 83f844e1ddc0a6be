"""The short way of ``make fuzz``: the same generators with fixed seeds, so that a run is as the one before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz import admin, http
from tests.fuzz.pipelines import BAD, GOOD, draw, read_by_h11
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer

pytestmark = pytest.mark.timeout(300)

SEED = 20
PIPELINES = 1_500
CALLS = 150


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        server.start()
        yield server


async def test_hostile_pipelines_are_framed_as_h11_and_uvicorn_frame_them() -> None:
    world = await http.fuzz(SEED, 0, PIPELINES)
    assert world.found == []
    assert world.messages > PIPELINES


def test_the_pipelines_are_of_all_kinds_and_drawn_again_the_same() -> None:
    drawn = [draw(SEED, number) for number in range(PIPELINES)]
    assert drawn == [draw(SEED, number) for number in range(PIPELINES)]
    assert {kind for pipeline in drawn for kind in pipeline.kinds} == {*GOOD, *BAD}
    ends = {read_by_h11(pipeline).end for pipeline in drawn}
    assert ends == {"complete", "closed", "refused", "incomplete"}


async def test_admin_calls_of_any_form_are_answered_and_refused_ones_change_nothing(
    server: NatsServer, postgres: PostgresServer
) -> None:
    outcome = await admin.fuzz(SEED, CALLS, server, postgres)
    assert outcome.found == []
    assert outcome.counts["200"] > 10
    assert outcome.counts["400"] > 30
