"""Local testing mode: applications within the process, called by handles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import muster as serve
from muster.exceptions import RequestCancelledError
from muster.handle import DeploymentHandle
from serve_common.errors import BadField, DeadlineExceeded

WAIT_S = 30.0


@serve.deployment
class Multiplier:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def reconfigure(self, config: dict[str, int]) -> None:
        self.factor = config["factor"]

    def __call__(self, number: int) -> int:
        return number * self.factor

    def fail(self) -> None:
        raise ValueError("three", self.factor)

    def items(self, count: int) -> Iterator[int]:
        yield from range(count)

    async def async_items(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def model(self) -> str:
        return serve.get_multiplexed_model_id()

    async def sleep(self) -> None:
        await asyncio.sleep(60)


@serve.deployment
class Adder:
    async def __init__(self, first: DeploymentHandle, increment: int) -> None:
        self.first, self.increment = first, increment

    async def __call__(self, number: int) -> int:
        return await self.first.remote(number) + self.increment

    async def chain(self, number: int) -> int:
        once = self.first.remote(number)
        return await self.first.remote(once)

    async def of(self, other: DeploymentHandle, number: int) -> int:
        return await other.remote(number)


def run(app: serve.Application) -> DeploymentHandle:
    return serve.run(app, _local_testing_mode=True)


def test_an_application_of_two_deployments_runs_within_the_process() -> None:
    handle = run(Adder.bind(Multiplier.bind(2), 3))
    assert handle.remote(5).result(WAIT_S) == 13
    assert handle.chain.remote(5).result(WAIT_S) == 20
    assert handle.of.remote(run(Multiplier.bind(7)), 2).result(WAIT_S) == 14

    async def called() -> list[int]:
        return list(await asyncio.gather(*(handle.remote(number) for number in range(3))))

    assert asyncio.run(called()) == [3, 5, 7]


def test_methods_streams_and_models_are_as_on_a_stack() -> None:
    handle = run(Multiplier.options(user_config={"factor": 5}).bind(2))
    assert handle.remote(2).result(WAIT_S) == 10
    assert list(handle.options(stream=True).items.remote(3)) == [0, 1, 2]
    assert list(handle.options(stream=True).async_items.remote(3)) == [0, 1, 2]
    assert handle.options(multiplexed_model_id="m1").model.remote().result(WAIT_S) == "m1"
    with pytest.raises(ValueError, match="three") as raised:
        handle.fail.remote().result(WAIT_S)
    assert raised.value.args == ("three", 5)
    with pytest.raises(BadField, match="does not exist"):
        handle.nothing.remote().result(WAIT_S)
    with pytest.raises(TypeError, match="stream=True"):
        handle.items.remote(3).result(WAIT_S)


def test_a_handle_is_of_one_replica_that_a_broadcast_calls_and_mistakes_about_streams_are_type_errors() -> (
    None
):
    handle = run(Multiplier.bind(2))
    assert handle.is_initialized
    assert handle.running_replicas_populated()
    assert handle.broadcast("__call__", 4).results(timeout_s=WAIT_S) == [8]
    assert asyncio.run(handle.broadcast("fail").results_async(return_exceptions=True))[0].args == ("three", 2)
    with pytest.raises(TypeError, match="did not return a generator"):
        list(handle.options(stream=True).remote(1))


def test_a_call_can_be_cancelled_and_has_its_deadline() -> None:
    handle = run(Multiplier.bind(2))
    response = handle.sleep.remote()
    response.cancel()
    with pytest.raises(RequestCancelledError):
        response.result(WAIT_S)
    with pytest.raises(DeadlineExceeded):
        handle.options(timeout_s=0.01).sleep.remote().result(WAIT_S)


def test_a_constructor_that_raises_raises_in_run() -> None:
    @serve.deployment
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        run(Broken.bind())


def test_what_could_not_travel_fails_here_too() -> None:
    handle = run(Multiplier.bind(2))
    with pytest.raises(TypeError, match="lock"):
        handle.remote(threading.Lock())


def test_a_function_is_called_too() -> None:
    @serve.deployment
    def double(number: Any) -> Any:
        return number * 2

    assert run(double.bind()).remote(4).result(WAIT_S) == 8
