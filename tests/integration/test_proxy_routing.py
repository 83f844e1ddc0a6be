"""Pinned keys, models and protection through a real proxy and a real nats-server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from serve_common.config.backend import BackpressureConfig, CircuitBreaker, EndpointOptions, OutlierEjection
from serve_common.dispatch.shadows import SHADOWS_PER_BACKEND_MAX
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.reports import Wake
from serve_common.protocol.snapshots import BackendProtection, BackendSnapshot
from serve_common.protocol.subjects import backend_key
from tests.support.servers.nats_server import NatsServer, until_known
from tests.support.stacks.proxy_stack import MIB, R0, R1, TAG, Stack
from tests.support.waiting import eventually

R2 = f"{TAG}#2"


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


# Shadows and shifts of traffic through a real proxy and a real nats-server.


OLD, NEW = BackendTag(TAG), BackendTag("default/new")
N0 = "default/new#7"


async def shadow_metric(stack: Stack, outcome: str) -> float:
    labels = f'{{backend_tag="{NEW}",endpoint_tag="{TAG}",outcome="{outcome}"}}'
    for line in (await stack.metrics()).splitlines():
        if line.startswith(f"serve_proxy_shadow_requests_total{labels}"):
            return float(line.split()[-1])
    return 0.0


async def until_shadows(stack: Stack, outcome: str, count: int) -> None:
    async with asyncio.timeout(30):
        while await shadow_metric(stack, outcome) < count:  # noqa: ASYNC110 - a metric tells nobody
            await asyncio.sleep(0.02)


async def test_a_shadow_sees_what_the_real_backend_sees_and_its_answers_are_dropped(stack: Stack) -> None:
    (real,) = await stack.serve(R0)
    shadow = await stack.add_replica(N0)
    await stack.put_backend(N0, tag=NEW)
    await stack.applied(await stack.put_endpoint(shadows={NEW: 1.0}))
    body = b"x" * (2 * MIB + 1)
    for path, sent, expected, outcome, count in (
        ("/echo?201", b"a", 201, "answered", 1),
        ("/echo/raise", b"b", 500, "error", 1),
        (f"/echo/big?{2 * MIB}", b"c", 200, "answered", 2),
        ("/echo", body, 200, "answered", 3),
    ):
        status, _, headers = await stack.get(
            path, "POST", data=iter_of(sent), headers={"X-Request-ID": "same"}
        )
        assert status == expected
        if "x-replica" in headers:
            assert headers["x-replica"] == R0
        await until_shadows(stack, outcome, count)  # copies are in no order among each other
    assert shadow.bodies == real.bodies
    assert [head.path for head in shadow.seen] == [head.path for head in real.seen]
    assert {head.request_id for head in shadow.seen} == {"same"}
    reply = await stack.client.request("serve.call.default.echo", b"by NATS", timeout=20)
    assert reply.data == b"by NATS"
    await until_shadows(stack, "answered", 4)
    await stack.applied(await stack.put_endpoint())
    await stack.get("/echo")
    assert len(shadow.seen) == 5


async def iter_of(body: bytes):
    for at in range(0, len(body), MIB):
        yield body[at : at + MIB]


async def test_a_shadow_that_hangs_or_dies_neither_delays_nor_fails_a_request(stack: Stack) -> None:
    await stack.serve(R0)
    shadow = await stack.add_replica(N0, limit=5)
    await stack.put_backend(N0, tag=NEW, limit=5, queue=0)
    await stack.applied(await stack.put_endpoint(shadows={NEW: 1.0}))
    shadow._work = lambda held: (
        None
    )  # never answers, and a single request that waited for it would fail the test
    statuses = [(await stack.get("/echo", "POST", data=b"x"))[0] for _ in range(300)]
    assert set(statuses) == {200}
    await until_shadows(stack, "skipped", 300 - SHADOWS_PER_BACKEND_MAX)
    await shadow.close()
    statuses = [(await stack.get("/echo", "POST", data=b"x"))[0] for _ in range(50)]
    assert set(statuses) == {200}
    await stack.put(backend_key(NEW), None)
    await until_shadows(stack, "failed", SHADOWS_PER_BACKEND_MAX)
    assert (await stack.get("/echo", "POST", data=b"x"))[0] == 200


async def test_a_header_selects_a_backend_that_has_no_weight_and_an_unknown_one_is_refused(
    stack: Stack,
) -> None:
    (old,) = await stack.serve(R0)
    new = await stack.add_replica(N0)
    await stack.put_backend(N0, tag=NEW)
    await stack.applied(
        await stack.put_endpoint(traffic={OLD: 1.0, NEW: 0.0}, options=EndpointOptions(backend_header="X-To"))
    )
    for value, serves in (("default/new", new), ("new", new), (OLD, old), ("", old)):
        before = len(serves.seen)
        status, _, _ = await stack.get("/echo", headers={"x-to": value})
        reply = await stack.client.request(
            "serve.call.default.echo", b"x", timeout=20, headers={"X-To": value}
        )
        assert (status, reply.data, len(serves.seen) - before) == (200, b"x", 2)
    message = "X-To: 'other' is no backend of endpoint 'default/echo'"
    status, body, _ = await stack.get("/echo", headers={"x-to": "other"})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["message"]) == (400, "bad_field", message)
    reply = await stack.client.request("serve.call.default.echo", b"x", timeout=20, headers={"X-To": "other"})
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["message"]) == ("bad_field", message)


async def test_a_shift_under_load_with_a_full_queue_loses_nothing(stack: Stack) -> None:
    (old,) = await stack.serve(R0, limit=2)
    new = await stack.add_replica(N0)
    await stack.put_backend(N0, tag=NEW, limit=2)
    statuses: Counter[tuple[int, str]] = Counter()
    is_over = False

    async def client() -> None:
        while not is_over:
            status, _, headers = await stack.get("/echo", "POST", data=b"x")
            statuses[status, headers.get("x-replica", "")] += 1

    async with asyncio.TaskGroup() as group:
        held = [group.create_task(stack.get("/echo/hold", "POST")) for _ in range(2)]
        await old.wait(lambda: len(old.held) == 2)
        for _ in range(16):
            group.create_task(client())
        await stack.queued(16)  # all wait for the old backend, which has no room
        await stack.applied(await stack.put_endpoint(traffic={NEW: 1.0}))
        await new.wait(lambda: len(new.seen) > 50)
        old.release()
        for share in (0.5, 0.0, 1.0, 0.5, 1.0):
            traffic = {OLD: 1 - share, NEW: share}
            seen = len(old.seen) + len(new.seen)
            await stack.applied(await stack.put_endpoint(traffic=traffic))
            both = (old, new) if share < 1 else (new, old)
            await both[0].wait(lambda seen=seen: len(old.seen) + len(new.seen) > seen + 50)
        # As a controller would after a shift: drain, stop, forget.
        await stack.applied(await stack.put_backend(draining=[R0], limit=2))
        await stack.came(old)
        await stack.applied(await stack.put_backend(limit=2))
        is_over = True
    assert [task.result()[0] for task in held] == [200, 200]
    assert {status for status, _ in statuses} == {200}
    assert {replica for _, replica in statuses} == {R0, N0}
    assert statuses.total() > 300


# Requests for a backend that was scaled to zero, through a real proxy and a real nats-server.


class Wakes:
    """What a controller would hear, and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, Wake]] = []
        self._came = asyncio.Event()

    async def hear(self, message) -> None:
        wake = msgspec.json.decode(message.data, type=Wake)
        assert message.subject == f"serve.wake.{TAG.replace('/', '.')}"
        assert wake.backend_tag == TAG
        self.heard.append((asyncio.get_running_loop().time(), wake))
        self._came.set()

    async def wait(self, count: int, waiting: int = 1) -> None:
        """Until so many were heard and the last one tells of ``waiting`` requests."""
        async with asyncio.timeout(30):
            while len(self.heard) < count or self.heard[-1][1].waiting < waiting:
                self._came.clear()
                await self._came.wait()


@pytest.fixture
async def wakes(stack: Stack) -> Wakes:
    """Heard of a backend that sleeps."""
    await stack.serve(can_wake=True)
    wakes = Wakes()
    await stack.client.subscribe(stack.subjects.wakes, cb=wakes.hear)
    await until_known(stack.client)
    return wakes


@pytest.fixture
async def group() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


async def all_heard(stack: Stack) -> None:
    """Until what the proxy has said is with who listens: answers to requests come on another connection."""
    await stack.proxy._bus.flush(20)
    await until_known(stack.client)


async def test_a_hundred_first_requests_of_every_kind_are_held_and_all_served(
    stack: Stack, wakes: Wakes, group: asyncio.TaskGroup
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    first = group.create_task(stack.get("/echo", "POST", data=b"first"))
    await wakes.wait(1)
    assert wakes.heard[0][1].waiting == 1

    requests = [first]
    requests += [group.create_task(stack.get("/echo", "POST", data=b"%d" % i)) for i in range(96)]
    large = group.create_task(stack.get("/echo/sink", "POST", data=iter_of(bytes(5 * MIB))))
    plain = group.create_task(stack.client.request("serve.call.default.echo", b"by NATS", timeout=30))
    socket = group.create_task(stack.session.ws_connect(stack.url + "/echo/ws"))
    await stack.queued(100)
    await wakes.wait(3, 100)  # at once, of those that came with it, and again after a second
    assert wakes.heard[2][0] - began > 0.9

    router = stack.proxy._ingress.routes.routers[BackendTag(TAG)]
    now = stack.proxy._ingress.routes.now
    # a hundred for about half a second
    await eventually(lambda: router.queued_seconds(now()) > 50)
    await stack.add_replica(R0)
    await stack.put_backend(R0)
    answers = [await request for request in requests]
    assert {status for status, _, _ in answers} == {200}
    assert sorted(body for _, body, _ in answers) == sorted([b"first", *(b"%d" % i for i in range(96))])
    assert (await large)[:2] == (200, b"%d" % (5 * MIB))
    assert (await plain).data == b"by NATS"
    async with await socket as opened:
        await opened.send_str("hello")
        assert await opened.receive_str(timeout=20) == "hello"
    await all_heard(stack)
    heard = len(wakes.heard)
    total = router.queued_seconds(now())
    await stack.get("/echo")
    await all_heard(stack)
    assert router.queued_seconds(now()) == total
    assert len(wakes.heard) == heard <= 3 + (loop.time() - began)


async def test_a_replica_that_leaves_while_requests_are_on_their_way_loses_none(
    stack: Stack, wakes: Wakes, group: asyncio.TaskGroup
) -> None:
    replica = await stack.add_replica(R0)
    await stack.applied(await stack.put_backend(R0))
    assert (await stack.get("/echo", "POST", data=b"x"))[0] == 200
    replica.is_draining = True  # it was told before the proxy was
    requests = [group.create_task(stack.get("/echo", "POST", data=b"x")) for _ in range(20)]
    await stack.queued(20)
    assert not wakes.heard
    await stack.put_backend(draining=[R0], can_wake=True)
    await wakes.wait(1, 20)
    await stack.put_backend(can_wake=True)
    other = await stack.add_replica("default/echo#9")
    await stack.put_backend(other.tag)
    assert {(await request)[0] for request in requests} == {200}
    assert len(other.seen) == 20


async def test_a_server_that_restarts_meanwhile_breaks_nothing(
    server: NatsServer, stack: Stack, wakes: Wakes, group: asyncio.TaskGroup
) -> None:
    request = group.create_task(stack.get("/echo", "POST", data=b"patient"))
    await wakes.wait(1)
    server.kill()
    late = group.create_task(stack.get("/echo", "POST", data=b"late"))
    server.start()
    heard = len(wakes.heard)
    await wakes.wait(heard + 1)
    await stack.add_replica(R0)
    await stack.put_backend(R0)
    assert (await request)[:2] == (200, b"patient")
    assert (await late)[:2] == (200, b"late")
