"""Pinned keys, models and protection through a real proxy and a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from serve_common.config.backend import BackpressureConfig, CircuitBreaker, OutlierEjection
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.protocol.subjects import backend_key
from tests.integration.nats_server import until_known
from tests.integration.proxy_stack import R0, R1, TAG, NatsServer, Stack, running_stack

pytestmark = pytest.mark.integration

R2 = f"{TAG}#2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def stack(server: NatsServer) -> AsyncIterator[Stack]:
    async with running_stack(server) as stack:
        yield stack


async def protect(stack: Stack, *replicas: str, queue: int = 1000, **protection) -> None:
    content = BackendSnapshot(
        backend_tag=BackendTag(TAG),
        replicas=[ReplicaTag(tag) for tag in replicas],
        draining=[],
        max_concurrent_queries=100,
        max_queued_requests=queue,
        protection=BackendProtection(**protection),
    )
    await stack.applied(await stack.put(backend_key(BackendTag(TAG)), content))


async def place(stack: Stack, **headers: str) -> str:
    """The one replica that all of some requests with these headers go to."""
    places = {
        (
            await stack.get(
                "/echo", headers={name.replace("_", "-"): value for name, value in headers.items()}
            )
        )[2]["x-replica"]
        for _ in range(4)
    }
    (only,) = places
    return only


async def test_a_key_keeps_its_replica_when_others_come_and_go(stack: Stack) -> None:
    await stack.serve(R0, R1)
    homes = {f"user-{number}": "" for number in range(12)}
    for key in homes:
        homes[key] = await place(stack, X_Serve_Shard_Key=key)
    assert set(homes.values()) == {R0, R1}
    await stack.add_replica(R2)
    await stack.applied(await stack.put_backend(R0, R1, R2))
    moved = {key: await place(stack, X_Serve_Shard_Key=key) for key in homes}
    assert {moved[key] for key in homes if moved[key] != homes[key]} <= {R2}
    await stack.applied(await stack.put_backend(R0, R1))
    assert {key: await place(stack, X_Serve_Shard_Key=key) for key in homes} == homes


async def test_requests_for_a_model_go_where_it_is_said_to_be_held(stack: Stack) -> None:
    await stack.serve(R0, R1)
    for holder in (R0, R1):
        other = R1 if holder == R0 else R0
        for replica, held in ((other, []), (holder, ["m1", f"only {holder}"])):
            subject = stack.subjects.models(ReplicaTag(replica))
            await stack.client.publish(subject, msgspec.msgpack.encode(held))
        await until_known(stack.client)  # from then on it comes to the proxy ahead of any answer
        session = {"serve_multiplexed_model_id": "m1"}
        async with asyncio.timeout(30):  # but maybe not ahead of the next question
            while (  # noqa: ASYNC110 - routers tell nobody what they heard
                await stack.get("/echo", headers=session)
            )[2]["x-replica"] != holder:
                await asyncio.sleep(0.01)
        taken = {(await stack.get("/echo", headers=session))[2]["x-replica"] for _ in range(8)}
        assert taken == {holder}


async def test_a_replica_that_fails_again_and_again_is_left_out_and_counted(stack: Stack) -> None:
    await stack.serve(R0, R1)
    await protect(
        stack, R0, R1, outlier_ejection=OutlierEjection(consecutive_failures=3, ejection_time_s=3600.0)
    )
    for _ in range(20):
        await stack.get("/echo/raise")
    assert f'serve_proxy_replica_ejections_total{{backend_tag="{TAG}"}} 1.0' in await stack.metrics()
    assert len({(await stack.get("/echo"))[2]["x-replica"] for _ in range(20)}) == 1


async def test_a_dead_backends_circuit_opens_and_says_so(stack: Stack) -> None:
    (replica,) = await stack.serve(R0)
    breaker = CircuitBreaker(requests_min=4, open_time_s=3600.0)
    await protect(stack, R0, circuit_breaker=breaker, backpressure_config=BackpressureConfig(status_code=429))
    async with asyncio.TaskGroup() as tasks:
        lost = [tasks.create_task(stack.get("/echo/hold", "POST")) for _ in range(4)]
        await replica.wait(lambda: len(replica.held) == 4)
        replica.forget()  # which a probe finds out
    assert {task.result()[0] for task in lost} == {502}
    status, body, headers = await stack.get("/echo")
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "circuit_open")
    assert 3500 < int(headers["Retry-After"]) <= 3600
    assert f'serve_proxy_circuit_open{{backend_tag="{TAG}"}} 1.0' in await stack.metrics()
    await protect(stack, R0, queue=0)
    assert (await stack.get("/echo"))[0] == 503
    await protect(stack, R0, circuit_breaker=CircuitBreaker(failure_percent=0.0))
    assert (await stack.get("/echo"))[0] == 200


async def test_a_full_queue_is_told_as_the_backend_wants_it(stack: Stack) -> None:
    await stack.serve()
    await protect(stack, queue=0, backpressure_config=BackpressureConfig(status_code=429, retry_after_s=7.2))
    status, body, headers = await stack.get("/echo")
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (429, "queue_full")
    assert headers["Retry-After"] == "8"
