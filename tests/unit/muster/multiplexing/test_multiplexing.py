"""`multiplexed`: what is loaded once, what goes when room is needed, and that nobody's model is pulled away."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

import muster as serve
from muster.multiplexing import models as models_module
from serve_common.names import BackendTag, ReplicaTag
from serve_common.runtime.request_context import (
    CurrentReplica,
    RequestContext,
    request_context,
    set_replica_context,
)
from serve_common.runtime.settings import BusSettings
from tests.support.waiting import eventually


class Model:
    """Says when it is closed, and whether anybody used it then."""

    alive: set[str]
    """Ids of all models in memory."""

    def __init__(self, model_id: str, log: list[str]) -> None:
        self.model_id = model_id
        self.log = log
        self.is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True
        self.log.append(f"close {self.model_id}")


class Server:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, BaseException] = {}

    @serve.multiplexed(max_num_models_per_replica=2)
    async def get(self, model_id: str) -> Model:
        self.log.append(f"load {model_id}")
        if model_id in self.gates:
            await self.gates[model_id].wait()
        if model_id in self.failures:
            raise self.failures[model_id]
        return Model(model_id, self.log)


def start(coro) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(coro)


async def ask(server: Server, model_id: str) -> Model:
    """As a request of its own, which ends at once."""
    return await start(server.get(model_id))


async def test_a_model_is_loaded_once_and_the_least_recently_used_goes() -> None:
    server = Server()
    a = await ask(server, "a")
    await ask(server, "b")
    assert await ask(server, "a") is a
    await ask(server, "c")
    await ask(server, "a")
    assert server.log == ["load a", "load b", "close b", "load c"]


async def test_those_who_ask_at_the_same_time_share_one_load() -> None:
    server = Server()
    found = await asyncio.gather(*(ask(server, "a") for _ in range(20)))
    assert len({id(model) for model in found}) == 1
    assert server.log == ["load a"]


async def test_different_models_load_at_the_same_time() -> None:
    server = Server()
    server.gates = {"a": asyncio.Event(), "b": asyncio.Event()}
    asked = [start(server.get(model_id)) for model_id in ("a", "b")]
    await eventually(lambda: server.log == ["load a", "load b"])
    for gate in server.gates.values():
        gate.set()
    assert [model.model_id for model in await asyncio.gather(*asked)] == ["a", "b"]


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(2), StopAsyncIteration()])
async def test_a_load_that_fails_fails_for_all_who_wait_and_is_tried_again(error) -> None:
    server = Server()
    server.failures["a"] = error

    async def outcome():
        try:
            return await server.get("a")
        except BaseException as raised:
            return raised

    assert await asyncio.gather(outcome(), outcome()) == [error, error]
    server.failures.clear()
    assert (await ask(server, "a")).model_id == "a"
    assert server.log == ["load a", "load a"]


async def test_a_model_in_use_stays_and_the_one_that_is_idle_goes() -> None:
    server = Server()
    release = asyncio.Event()

    async def hold(model_id: str) -> bool:
        model = await server.get(model_id)
        await release.wait()
        return model.is_closed

    holder = start(hold("a"))
    await eventually(lambda: server.log)
    await ask(server, "b")
    await ask(server, "c")  # a is the least recently used one
    assert server.log == ["load a", "load b", "close b", "load c"]
    release.set()
    assert not await holder


async def test_when_all_are_in_use_a_load_waits_for_one_that_is_not() -> None:
    server = Server()
    releases = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def hold(model_id: str) -> None:
        await server.get(model_id)
        await releases[model_id].wait()

    holders = [start(hold(model_id)) for model_id in releases]
    await eventually(lambda: len(server.log) == 2)
    third = start(server.get("c"))
    await asyncio.sleep(0.02)
    assert server.log == ["load a", "load b"]
    releases["b"].set()
    assert (await third).model_id == "c"
    assert server.log == ["load a", "load b", "close b", "load c"]
    releases["a"].set()
    await asyncio.wait(holders)


async def test_requests_that_each_need_several_models_do_not_wait_for_each_other_for_ever() -> None:
    server = Server()

    async def chain(*model_ids: str) -> list[str]:
        used = [await server.get(model_id) for model_id in model_ids]
        assert not any(model.is_closed for model in used)
        return [model.model_id for model in used]

    async with asyncio.timeout(30):
        found = await asyncio.gather(
            *(map(start, (chain("a", "b", "c"), chain("c", "d", "a"), chain("b", "a", "e"))))
        )
    assert found == [["a", "b", "c"], ["c", "d", "a"], ["b", "a", "e"]]


async def test_after_a_while_a_model_in_use_must_go_and_is_closed_when_its_user_is_done(monkeypatch) -> None:
    monkeypatch.setattr(models_module, "SLOT_WAIT_S", 0.02)
    server = Server()
    release = asyncio.Event()

    async def hold(*model_ids: str) -> list[bool]:
        used = [await server.get(model_id) for model_id in model_ids]
        await release.wait()
        return [model.is_closed for model in used]

    holder = start(hold("a", "b"))
    await eventually(lambda: len(server.log) == 2)
    assert (await ask(server, "c")).model_id == "c"
    assert server.log == ["load a", "load b", "load c"]
    release.set()
    assert await holder == [False, False]
    await eventually(lambda: server.log[-1] == "close a")


async def test_a_load_goes_on_when_those_who_asked_are_gone() -> None:
    server = Server()
    server.gates["a"] = asyncio.Event()
    asked = start(server.get("a"))
    await eventually(lambda: server.log)
    asked.cancel()
    await asyncio.wait([asked])
    server.gates["a"].set()
    await ask(server, "a")
    assert server.log == ["load a"]


async def test_a_load_that_waits_for_a_place_is_given_up_when_nobody_wants_it() -> None:
    server = Server()
    release = asyncio.Event()

    async def hold() -> None:
        await server.get("a")
        await server.get("b")
        await release.wait()

    holder = start(hold())
    await eventually(lambda: len(server.log) == 2)
    for turns in range(4):
        third = start(server.get("c"))
        for _ in range(turns):
            await asyncio.sleep(0)
        third.cancel()
        await asyncio.wait([third])
    release.set()
    await holder
    await ask(server, "d")
    assert "load c" not in server.log
    assert (await ask(server, "c")).model_id == "c"


async def test_a_cancelled_caller_does_not_take_the_model_from_the_others() -> None:
    server = Server()
    server.gates["a"] = asyncio.Event()
    first, second = start(server.get("a")), start(server.get("a"))
    await eventually(lambda: server.log)
    first.cancel()
    server.gates["a"].set()
    assert (await second).model_id == "a"


async def test_a_plain_del_runs_once_also_for_a_model_in_a_cycle_and_before_the_next_is_loaded() -> None:
    log = []

    class InCycle:
        def __init__(self, model_id: str) -> None:
            self.itself = self
            self.model_id = model_id

        def __del__(self) -> None:
            log.append(f"del {self.model_id}")

    @serve.multiplexed(max_num_models_per_replica=1)
    async def get(model_id: str) -> InCycle:
        log.append(f"load {model_id}")
        return InCycle(model_id)

    for model_id in ("a", "b", "c"):
        await start(get(model_id))
    assert log == ["load a", "del a", "load b", "del b", "load c"]


async def test_an_async_del_is_awaited_once() -> None:
    log = []

    class Closing:
        async def __del__(self) -> None:
            await asyncio.sleep(0)
            log.append("closed")

    @serve.multiplexed(max_num_models_per_replica=1)
    async def get(model_id: str) -> Closing:
        return Closing()

    await start(get("a"))
    await start(get("b"))
    assert log == ["closed"]
    gc.collect()
    assert log == ["closed"]
    # The second one goes with the test, where a coroutine that nobody awaits would be a warning.
    second = await start(get("b"))
    second.__class__ = type("Quiet", (Closing,), {"__del__": lambda _: None})


async def test_a_model_that_cannot_be_closed_does_not_stop_the_next_one() -> None:
    class Broken:
        async def aclose(self) -> None:
            raise OSError("no")

    @serve.multiplexed(max_num_models_per_replica=1)
    async def get(model_id: str) -> Broken:
        return Broken()

    assert await start(get("a")) is not await start(get("b"))


async def test_no_limit_is_no_limit() -> None:
    @serve.multiplexed(max_num_models_per_replica=-1)
    async def get(model_id: str) -> str:
        return model_id

    assert [await start(get(f"m{i}")) for i in range(50)] == [f"m{i}" for i in range(50)]


async def test_routers_are_told_of_every_change(monkeypatch) -> None:
    monkeypatch.setattr(models_module, "_all", type(models_module._all)())
    told: list[list[str]] = []
    context = CurrentReplica(
        replica_tag=ReplicaTag("app/d#1"),
        backend_tag=BackendTag("app/d"),
        bus=BusSettings(servers=[], user="", password="", inbox_prefix="", subject_prefix=""),
        code_version=1,
        peer_versions={},
        publish_models=lambda ids: told.append(list(ids)),
    )
    set_replica_context(context)
    try:
        server, other = Server(), Server()
        await ask(server, "a")
        assert told[0] == ["a"]  # as soon as it is wanted
        await ask(other, "z")
        await ask(server, "b")
        await ask(server, "c")
        assert told[-1] == ["b", "c", "z"]
        server.failures["x"] = OSError("no such model")
        with pytest.raises(OSError, match="no such model"):
            await ask(server, "x")
        assert told[-1] == ["c", "z"]
    finally:
        set_replica_context(None)


async def test_the_model_of_a_request_is_known() -> None:
    assert serve.get_multiplexed_model_id() == ""
    request_context.set(RequestContext(model_id="m7"))
    assert serve.get_multiplexed_model_id() == "m7"


async def test_the_loader_runs_for_the_model_and_for_no_request() -> None:
    seen = []

    @serve.multiplexed
    async def get(model_id: str) -> str:
        seen.append(serve.get_request_context())
        return model_id

    request_context.set(RequestContext(model_id="a", request_id="r", deadline=1.0))
    await get("a")
    assert (seen[0].model_id, seen[0].request_id, seen[0].deadline) == ("a", "", None)


async def test_bad_ids_and_bad_functions_are_refused() -> None:
    server = Server()
    for wrong, error in ((7, TypeError), ("", ValueError), ("x" * 300, ValueError)):
        with pytest.raises(error, match=r"[Tt]he model (id has 300|ID cannot be empty|ID must be a string)"):
            await server.get(wrong)
    with pytest.raises(TypeError, match=r"Server\.get"):
        await server.get("a", "b")
    with pytest.raises(TypeError, match="async functions or methods"):
        serve.multiplexed(lambda model_id: model_id)
    for places in (0, -2):
        with pytest.raises(ValueError, match="must be positive"):
            serve.multiplexed(max_num_models_per_replica=places)
    with pytest.raises(TypeError, match="must be an integer"):
        serve.multiplexed(max_num_models_per_replica=2.5)

    async def two(model_id, other):
        return None

    with pytest.raises(TypeError, match="no others"):
        serve.multiplexed(two)


@pytest.mark.parametrize("seed", range(12))
async def test_in_any_order_everybody_gets_their_model_unclosed_and_memory_is_bounded(seed: int) -> None:
    chance = random.Random(seed)
    alive: set[str] = set()
    most = 0

    class Tracked(Model):
        async def aclose(self) -> None:
            await super().aclose()
            alive.discard(self.model_id)

    @serve.multiplexed(max_num_models_per_replica=3)
    async def get(model_id: str) -> Tracked:
        nonlocal most
        await asyncio.sleep(chance.random() * 0.002)
        if chance.random() < 0.1:
            raise OSError(model_id)
        alive.add(model_id)
        most = max(most, len(alive))
        return Tracked(model_id, [])

    async def request() -> None:
        model_id = f"m{chance.randrange(7)}"
        try:
            model = await get(model_id)
        except OSError:
            return
        assert model.model_id == model_id
        assert not model.is_closed
        await asyncio.sleep(chance.random() * 0.002)
        assert not model.is_closed

    requests = [start(request()) for _ in range(150)]
    for one in requests:
        if chance.random() < 0.2:
            asyncio.get_running_loop().call_later(chance.random() * 0.05, one.cancel)
    async with asyncio.timeout(30):
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert not [result for result in results if isinstance(result, AssertionError)]
    assert most <= 3
