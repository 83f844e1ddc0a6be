"""The benchmark's own clients must count what was really sent, whole or cut anywhere, and errors as errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.bench.floor_ingress import bare
from tests.bench.generators import Generators
from tests.bench.loads import MIB, OTHER_LOADS, Kind, Load, Served
from tests.integration.chaos import Kill, Storm
from tests.integration.chaos_load import ChaosLoad, Failure


@pytest.fixture
async def url() -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(await bare()))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("path", [Served.ECHO, Served.UPLOAD])
async def test_a_body_is_sent_whole_and_its_answer_checked(url: str, tmp_path: Path, path: Served) -> None:
    load = Load(name="body", path=path, kind=Kind.TRANSFER, body_bytes=3 * MIB + 5)
    figures = await Generators("none", tmp_path).run(load, f"{url}/{path.value}", 0)
    assert (figures.requests, figures.errors) == (2, 0)
    assert figures.rate > 0


async def test_a_short_answer_to_a_body_is_an_error(url: str, tmp_path: Path) -> None:
    load = Load(name="body", path=Served.ECHO, kind=Kind.TRANSFER, body_bytes=1000)
    figures = await Generators("none", tmp_path).run(load, f"{url}/noop", 0)
    assert (figures.requests, figures.errors, figures.rate) == (0, 2, 0.0)


async def test_every_token_is_counted_once_wherever_the_stream_is_cut(url: str, tmp_path: Path) -> None:
    load = next(load for load in OTHER_LOADS if load.kind is Kind.TOKENS and load.connections > 1)
    small = Load(name="tokens", path=load.path, kind=load.kind, connections=5, tokens=777)
    generators = Generators("none", tmp_path)
    figures = await generators.run(small, f"{url}/tokens", 1)
    assert figures.errors == 0
    assert figures.requests >= 5
    assert figures.first_ms is not None
    taken_s = figures.requests * 777 / figures.rate
    assert 1.0 <= taken_s < 10.0, "rate and number of answers fit together"


async def test_losses_are_held_against_the_kill_before_them() -> None:
    load = ChaosLoad("/x", [1], 1.0)
    kills = [Kill(at=at, pid=1, fragile_in_flight=1) for at in (10.0, 20.0)]

    def lost(*moments: float, clients: int = 1) -> list[str]:
        load.failures = [
            Failure(kind="POST", ended_at=at, what="502 replica_died", client=number % clients)
            for number, at in enumerate(moments)
        ]
        return Storm(load=load, kills=kills).lost_beyond()

    assert lost() == lost(10.5, 20.5) == lost(10.5, 11.0, clients=2) == []
    assert lost(10.5, 11.0) == ["client 0 lost 2 at one kill"]
    assert lost(9.0) == ["1 lost without a kill"]
    assert not Failure(kind="GET", ended_at=0.0, what="502 replica_died").is_allowed
    assert not Failure(kind="POST", ended_at=0.0, what="504 deadline_exceeded").is_allowed
