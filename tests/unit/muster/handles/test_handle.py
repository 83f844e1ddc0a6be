"""A handle's calls on their way out, with the real router and a bus made of lists."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from muster.handles import (
    DeploymentBroadcastResponse,
    DeploymentHandle,
    RequestCancelledError,
    get_app_handle,
    get_deployment_handle,
    router,
)
from muster.handles import calls as items_module
from muster.handles import handle as handle_module
from muster.handles.calls import ItemReader
from muster.handles.options import PROGRAM_GRACE_S, CallNotAllowed, HandleOptions, compute_deadline
from muster.handles.runtime import find_bus, find_bus_outside_replica
from muster.handles.wakeups import Wakers, make_waiter, wait_in_thread
from muster.secrets import generate
from serve_common.config.backend import BackpressureConfig
from serve_common.dispatch.errors import BackendStopped, CircuitOpen, ResponseUnusable
from serve_common.errors import (
    BadField,
    BusUnavailable,
    DeadlineExceeded,
    NotFound,
)
from serve_common.identities.credentials import CredentialsFile
from serve_common.identities.roles import Role
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.frames import RefusedHead, RequestKind
from serve_common.protocol.snapshots import BackendProtection
from serve_common.routing.queues import Refusal
from serve_common.runtime import request_context as request_context_module
from serve_common.runtime.request_context import (
    CurrentReplica,
    RequestContext,
    request_context,
    set_replica_context,
)
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.threads import Mailbox
from tests.support.handle_world import TAG, Sent, World, call, make_world, pickled_items, stream


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch, "default/a")


# -- calls --


async def test_a_call_carries_arguments_and_method_and_brings_its_value_to_every_await(world: World) -> None:
    response = call(world.handle().predict, 1, "two", three=[3])
    sent = await world.sent()
    assert sent.subject == "serve.replica.default.a.0"
    assert sent.head.kind is RequestKind.PYTHON
    assert sent.head.endpoint_tag == "default/a"
    assert sent.head.call is not None
    assert (sent.head.call.method_name, sent.head.call.stream, sent.head.call.is_pickled) == (
        "predict",
        False,
        True,
    )
    assert sent.arguments == ((1, "two"), {"three": [3]})
    sent.answer({"digit": 7})
    first = await response
    assert first == {"digit": 7}
    assert await response is first
    assert world.is_idle


async def test_several_tasks_may_wait_for_one_answer(world: World) -> None:
    response = call(world.handle(), 1)

    async def wait() -> Any:
        return await response

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(wait()) for _ in range(3)]
        (await world.sent()).answer("yes")
    assert [task.result() for task in waiting] == ["yes"] * 3


async def test_a_thread_waits_by_result_and_a_loop_may_not(world: World) -> None:
    response = call(world.handle(), 1)
    with pytest.raises(RuntimeError, match="await response"):
        response.result()
    waiting = asyncio.to_thread(response.result, 5)
    (await world.sent()).answer("yes")
    assert await waiting == "yes"


async def test_result_gives_up_waiting_but_not_the_call(world: World) -> None:
    response = call(world.handle(), 1)
    with pytest.raises(TimeoutError, match="within"):
        await asyncio.to_thread(response.result, 0.01)
    (await world.sent()).answer("late")
    assert await response == "late"


async def test_options_reach_the_request_and_what_is_not_given_stays(world: World) -> None:
    handle = world.handle().options(multiplexed_model_id="m1", timeout_s=200.0).options(method_name="embed")
    _ = call(handle)
    head = (await world.sent()).head
    assert head.call is not None
    assert (head.call.method_name, head.call.model_id) == ("embed", "m1")
    assert 150 < head.timeout_s <= 200


@pytest.mark.parametrize(
    ("options", "left_s"),
    [
        ({}, 7 * 86_400),
        ({"timeout_s": 300, "relative_slo_ms": 200_000}, 200),
        ({"relative_slo_ms": 500_000}, 500),
    ],
)
async def test_the_earliest_deadline_counts(world: World, options: dict[str, Any], left_s: float) -> None:
    _ = call(world.handle().options(**options))
    assert (await world.sent()).head.timeout_s == pytest.approx(left_s, abs=50)


def test_calls_of_a_program_outlast_their_request_by_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    options = HandleOptions()
    assert compute_deadline(options, 5.0, 1.0, 0.0) == 5.0
    monkeypatch.setattr(request_context_module, "_current", SimpleNamespace(is_program=True))
    assert compute_deadline(options, 5.0, 1.0, 0.0) == 5.0 + PROGRAM_GRACE_S
    assert compute_deadline(HandleOptions(timeout_s=1.0), 5.0, 1.0, 0.0) == 2.0


async def test_an_absolute_deadline_is_of_the_calendar(world: World) -> None:
    unix_now = time.time()  # noqa: TID251 - what the option is given in
    _ = call(world.handle().options(absolute_slo_ms=(unix_now + 400) * 1000))
    assert (await world.sent()).head.timeout_s == pytest.approx(400, abs=50)
    with pytest.raises(DeadlineExceeded):
        await call(world.handle().options(absolute_slo_ms=(unix_now - 4) * 1000))


async def test_a_call_takes_over_what_its_request_has(world: World) -> None:
    token = request_context.set(
        RequestContext(request_id="r1", traceparent="00-t", deadline=time.monotonic() + 100)
    )
    try:
        response = call(world.handle().options(timeout_s=5000))
    finally:
        request_context.reset(token)
    head = (await world.sent()).head
    assert (head.request_id, head.traceparent, response.request_id) == ("r1", "00-t", "r1")
    assert 50 < head.timeout_s <= 100


async def test_a_call_past_its_requests_deadline_never_leaves(world: World) -> None:
    token = request_context.set(RequestContext(request_id="r1", deadline=time.monotonic() - 1))
    try:
        response = call(world.handle())
    finally:
        request_context.reset(token)
    with pytest.raises(DeadlineExceeded):
        await response
    assert world.is_idle


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"relative_slo_ms": -1}, {"method_name": "no method"}])
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadField, match=next(iter(options))):
        DeploymentHandle("a", "default").options(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"request_serialization": "xml"},
        {"response_serialization": ""},
    ],
)
def test_an_option_that_is_not_there_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(RayServeException, match=f"^{next(iter(options))}: "):
        DeploymentHandle("a", "default").options(**options)


def test_options_that_change_nothing_are_taken_and_locality_warns() -> None:
    handle = DeploymentHandle[object]("a", "default").options(
        _by_reference=True,
        _prefer_local_routing=False,
        request_serialization="msgpack",
        response_serialization="orjson",
    )
    with pytest.warns(UserWarning, match="_prefer_local_routing has no effect"):
        handle.options(_prefer_local_routing=True)
    handle.shutdown()
    asyncio.run(handle.shutdown_async())


def test_a_handle_is_initialized_once_the_process_has_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, started = DeploymentHandle("a", "default"), list[int]()
    assert not handle.is_initialized
    assert not handle.running_replicas_populated()

    def fail() -> None:
        raise BusUnavailable("not yet")

    monkeypatch.setattr(handle_module, "runtime", fail)
    with pytest.raises(BusUnavailable):
        handle._init()
    monkeypatch.setattr(handle_module, "runtime", lambda: started.append(1))
    with pytest.raises(BadField, match="one router"):
        handle._init(_run_router_in_separate_loop=False)
    assert not started
    handle._init()
    assert started
    with pytest.raises(RuntimeError, match="already been initialized"):
        handle._init()
    monkeypatch.setattr(handle_module, "is_running", lambda: True)
    assert handle.is_initialized


async def test_a_response_within_another_value_is_refused_with_a_sentence(world: World) -> None:
    response = call(world.handle(), 1)
    for nested in ([response], {"deep": {"r": response}}):
        with pytest.raises(RayServeException, match="a list or dictionary\\) to a downstream"):
            world.handle().remote(nested)
    with pytest.raises(RuntimeError, match="streamed response"):
        world.handle().remote(world.handle().options(stream=True).remote())
    assert not response.by_reference


class _FakeRay:
    """Ray, as far as responses use it."""

    def __init__(self, *, is_used: bool) -> None:
        self.is_initialized = lambda: is_used

    def put(self, value: Any) -> Any:
        return ("ref", value)


async def test_the_value_of_a_response_becomes_an_object_of_this_process_ray(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", _FakeRay(is_used=True))
    response = call(world.handle(), 1)
    (await world.sent()).answer({"a": 1})
    assert await response._to_object_ref() == ("ref", {"a": 1})
    assert response._to_object_ref_sync(1, _allow_running_in_asyncio_loop=True) == ("ref", {"a": 1})
    assert await asyncio.to_thread(response._to_object_ref_sync, _timeout_s=1) == ("ref", {"a": 1})
    with pytest.raises(RuntimeError, match="event loop"):
        response._to_object_ref_sync()
    monkeypatch.setitem(sys.modules, "ray", _FakeRay(is_used=False))
    with pytest.raises(RuntimeError, match="needs Ray"):
        await response._to_object_ref()
    items = stream(world.handle(), 2)
    with pytest.raises(RuntimeError, match="read it"):
        await items._to_object_ref_gen()
    with pytest.raises(RuntimeError, match="read it"):
        items._to_object_ref_gen_sync()


async def test_a_response_is_awaited_in_another_loop_and_thread_than_its_makers(world: World) -> None:
    response, items = call(world.handle(), 1), stream(world.handle(), 2)

    async def read() -> Any:
        return await response, [item async for item in items]

    async with asyncio.TaskGroup() as tasks:
        elsewhere = tasks.create_task(asyncio.to_thread(lambda: asyncio.run(read())))
        for sent in [await world.sent(), await world.sent()]:
            if sent.head.call is not None and sent.head.call.stream:
                sent.open(pickled_items(1, 2))
                sent.more(b"", last=True)
            else:
                sent.answer("yes")
        assert await response == "yes"
    assert elsewhere.result() == ("yes", [1, 2])


async def test_cancelled_says_so_at_once_and_a_loop_may_be_told_to_block(world: World) -> None:
    response = call(world.handle(), 1)
    assert not response.cancelled()
    with pytest.raises(TimeoutError):
        response.result(timeout_s=0.01, _skip_asyncio_check=True)
    response.cancel()
    assert response.cancelled()
    with pytest.raises(RequestCancelledError):
        await response
    done = call(world.handle(), 1)
    (await world.sent()).answer(1)
    assert await done == 1
    done.cancel()
    assert done.cancelled(), "as in Ray Serve: it was asked for"
    assert await done == 1


def test_errors_of_a_full_queue_and_of_what_is_stopped_travel_and_are_apart() -> None:
    full = BackPressureError.of_backend(
        BackendTag("a/b"), 5, BackendProtection(backpressure_config=BackpressureConfig(status_code=429))
    )
    for error in (full, BackendStopped(BackendTag("a/b")), CircuitOpen(BackendTag("a/b"), 2.0)):
        restored = pickle.loads(pickle.dumps(error))
        assert type(restored) is type(error)
        assert restored.message == str(error)
        assert vars(restored) == vars(error)
        assert isinstance(restored, DeploymentUnavailableError) == (error is not full)
    assert full.status_code == 429


# -- names --


def test_a_handle_is_pickled_as_names_and_options() -> None:
    found = get_deployment_handle("shop/a", _check_exists=False)
    handle = found.options(stream=True, shard_key="k").predict
    restored = pickle.loads(pickle.dumps(handle))
    assert repr(restored) == "DeploymentHandle(deployment='a')"
    assert restored.app_name == "shop"
    assert restored == handle
    assert hash(restored) == hash(handle)
    assert restored != found
    assert found == get_deployment_handle("shop/a", _check_exists=False)
    assert str(found.deployment_id) == "Deployment(name='a', app='shop')"
    assert len({restored, handle, found}) == 2
    assert restored._options == handle._options
    assert copy.deepcopy(handle).app_name == "shop"
    assert len(pickle.dumps(handle)) < 500


def test_a_handle_is_of_the_replicas_own_application_unless_told() -> None:
    with pytest.raises(
        RayServeException, match=r"^Please specify an application name .* a Serve application\.$"
    ):
        get_deployment_handle("a")
    bus = BusSettings(servers=["nats://x"], user="", password="", inbox_prefix="_I", subject_prefix="serve")
    set_replica_context(
        CurrentReplica(
            replica_tag=TAG, backend_tag=BackendTag("shop/b"), bus=bus, code_version=1, peer_versions={}
        )
    )
    try:
        assert get_deployment_handle("a", _check_exists=False).app_name == "shop"
        assert get_deployment_handle("a", "till", _check_exists=False).app_name == "till"
    finally:
        set_replica_context(None)


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "/a"])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(BadField):
        get_deployment_handle(name)


async def test_an_application_is_called_at_the_deployment_with_a_route(world: World) -> None:
    world.deploy("shop/inner", "shop/other")
    world.deploy("shop/front", route="/")
    shop = await asyncio.to_thread(get_app_handle, "shop")
    assert (shop.deployment_name, shop.app_name) == ("front", "shop")
    _ = call(shop)
    assert (await world.sent()).subject == "serve.replica.shop.front.0"
    world.deploy("shop/second", route="/2")
    with pytest.raises(NotFound, match="2 deployments with a route"):
        await asyncio.to_thread(get_app_handle, "shop")
    world.deploy("bank/vault", "bank/other")
    with pytest.raises(NotFound, match="Application 'bank' does not exist"):
        await asyncio.to_thread(get_app_handle, "bank")
    world.deploy("bank/front", is_ingress=True, whole=False)
    _ = call(await asyncio.to_thread(get_app_handle, "bank"))
    assert (await world.sent()).subject == "serve.replica.bank.front.0"
    world.deploy("default/a")
    _ = call(await asyncio.to_thread(get_app_handle, "default"))
    assert (await world.sent()).subject == "serve.replica.default.a.0"
    world.deploy("default/b", route="/b")
    world.deploy("default/front", route="/", is_ingress=True)
    _ = call(await asyncio.to_thread(get_app_handle, "default"))
    assert (await world.sent()).subject == "serve.replica.default.front.0"


@pytest.fixture
def in_replica() -> Iterator[CurrentReplica]:
    """Of the deployment shop/front."""
    context = CurrentReplica(
        replica_tag=ReplicaTag("shop/front#3"),
        backend_tag=BackendTag("shop/front"),
        bus=BusSettings(servers=["nats://x"], user="", inbox_prefix="_I", subject_prefix="serve"),
        code_version=1,
        peer_versions={},
    )
    set_replica_context(context)
    yield context
    set_replica_context(None)


async def test_a_replica_calls_its_own_application_and_whom_may_call_names(
    world: World, in_replica: CurrentReplica
) -> None:
    world.deploy("shop/inner", "bank/ledger", "bank/vault")
    own = partial(get_deployment_handle, _check_exists=False)
    _ = call(own("inner"))
    assert (await world.sent()).subject == "serve.replica.shop.inner.0"
    with pytest.raises(CallNotAllowed, match="'shop/front' may not call 'bank/ledger'"):
        await call(world.handle("ledger", "bank"))
    in_replica.may_call = ("bank/ledger",)  # as a reconfigure does
    _ = call(world.handle("ledger", "bank"))
    assert (await world.sent()).subject == "serve.replica.bank.ledger.0"
    for name, app in (("vault", "bank"), ("inner", "shop")):
        with pytest.raises(CallNotAllowed, match="allows bank/ledger"):
            await call(world.handle(name, app))
    in_replica.may_call = ()
    with pytest.raises(CallNotAllowed, match="allows nobody"):
        await call(own("inner"))
    in_replica.may_call = ("*",)
    _ = call(world.handle("vault", "bank"))
    assert (await world.sent()).subject == "serve.replica.bank.vault.0"


# -- all replicas at once --


async def broadcast(
    world: World, *args: Any, **kwargs: Any
) -> tuple[DeploymentBroadcastResponse, list[Sent]]:
    response = world.handle().broadcast("reset", *args, **kwargs)
    return response, [await world.sent() for _ in range(3)]


async def test_a_broadcast_calls_every_running_replica_once(world: World) -> None:
    world.deploy("default/a", replicas=3)
    assert await asyncio.to_thread(world.handle().running_replicas_populated)
    response, requests = await broadcast(world, 1, deep=True)
    assert sorted(sent.subject for sent in requests) == [f"serve.replica.default.a.{n}" for n in range(3)]
    for number, sent in enumerate(requests):
        assert sent.head.call is not None
        assert (sent.head.call.method_name, sent.head.may_queue) == ("reset", True)
        assert sent.arguments == ((1,), {"deep": True})
        sent.answer(number)
    assert sorted(await response.results_async()) == [0, 1, 2]
    assert sorted(await asyncio.to_thread(response.results)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="event loop"):
        response.results()
    assert world.is_idle


async def test_a_broadcast_reaches_replicas_whose_slots_are_taken(world: World) -> None:
    world.deploy("default/a", replicas=3, can_wake=True)
    for _ in range(300):
        _ = call(world.handle(), 1)
        await world.sent()
    waits = call(world.handle(), 1)
    response, requests = await broadcast(world)
    for sent in requests:
        sent.answer(None)
    assert await response.results_async() == [None] * 3
    waits.cancel()
    with pytest.raises(RequestCancelledError):
        await waits


async def test_a_broadcast_that_one_replica_does_not_take_goes_to_no_other(world: World) -> None:
    world.deploy("default/a", replicas=3)
    response, requests = await broadcast(world)
    requests[0].say(RefusedHead(Refusal.DRAINING.value, 0))
    world.receivers[requests[1].reply][1]()  # no responders
    requests[2].answer("done")
    results = await response.results_async(return_exceptions=True)
    assert [type(result) for result in results] == [ReplicaUnavailableError, ReplicaUnavailableError, str]
    with pytest.raises(ReplicaUnavailableError, match="takes no requests"):
        await response.results_async()
    collected = await asyncio.to_thread(response.results, return_exceptions=True)
    assert [type(result) for result in collected] == [type(result) for result in results]
    assert world._requests.empty()
    assert world.is_idle


async def test_a_call_goes_to_the_replica_that_was_chosen_for_it(world: World) -> None:
    world.deploy("default/a", replicas=2)
    handle = world.handle().options(method_name="predict")
    async with handle.choose_replica() as first, handle.choose_replica(1, key="b") as second:
        assert {first.replica_id, second.replica_id} == {"default/a#0", "default/a#1"}, "each has one by now"
        for selection in (second, first):
            response = world.handle().dispatch(selection, 1, two=2)
            sent = await world.sent()
            assert sent.subject == f"serve.replica.default.a.{selection.replica_id[-1]}"
            assert sent.head.call is not None
            assert (sent.head.call.method_name, sent.head.may_queue) == ("predict", True)
            assert sent.arguments == ((1,), {"two": 2})
            sent.answer("yes")
            assert await response == "yes"
        with pytest.raises(ValueError, match="a different deployment"):
            world.handle("b").dispatch(first)
        with pytest.raises(RuntimeError, match="has already been dispatched"):
            world.handle().dispatch(first)
    async with handle.choose_replica() as third, handle.choose_replica() as fourth:
        world.deploy("default/a", replicas=1)
        gone = max(third, fourth, key=lambda selection: selection.replica_id)
        with pytest.raises(ReplicaUnavailableError):
            await world.handle().dispatch(gone)
    assert not world.router._chosen
    with pytest.raises(NotFound, match="default/nobody"):
        async with world.handle("nobody").choose_replica():
            pass
    with pytest.raises(NotImplementedError):
        async with DeploymentHandle("a", "default", post=[].append).choose_replica():
            pass


async def test_a_broadcast_waits_for_its_arguments_and_not_for_ever(world: World) -> None:
    world.deploy("default/a", replicas=3)
    value = call(world.handle().first)
    response = world.handle().broadcast("reset", value)
    first = await world.sent()
    with pytest.raises(TimeoutError, match="within"):
        await asyncio.to_thread(response.results, timeout_s=0.01)
    first.answer("one")
    requests = [await world.sent() for _ in range(3)]
    assert all(sent.arguments == (("one",), {}) for sent in requests)
    with pytest.raises(TimeoutError, match="within"):
        await response.results_async(timeout_s=0.01)
    with pytest.raises(ValueError, match="non-negative"):
        await response.results_async(timeout_s=-1)


async def test_a_broadcast_to_nobody_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ENDPOINT_GRACE_S", 0.01)
    world.deploy("default/a", replicas=0)
    assert not await asyncio.to_thread(world.handle().running_replicas_populated)
    assert await world.handle().broadcast("reset").results_async() == []
    with pytest.raises(NotFound, match="default/nobody") as gone:
        await world.handle("nobody").broadcast("reset").results_async()
    assert isinstance(gone.value, DeploymentUnavailableError)  # as Ray Serve's programs know it
    world.is_connected = False
    world.deploy("default/a")
    with pytest.raises(BusUnavailable, match="does not wait"):
        await world.handle().broadcast("reset").results_async()


# -- before there is a route --


async def test_a_call_waits_for_the_bucket_and_for_what_was_just_deployed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(monkeypatch)
    early, unknown = call(world.handle("a"), 1), call(world.handle("b"), 2)
    await world.settle()
    world.deploy("default/a")
    assert (await world.sent()).arguments == ((1,), {})
    world.deploy("default/b", whole=False)
    assert (await world.sent()).arguments == ((2,), {})
    assert not early.cancelled()
    assert not unknown.cancelled()


async def test_an_unknown_deployment_is_told_soon(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ENDPOINT_GRACE_S", 0.01)
    with pytest.raises(NotFound, match="default/nobody"):
        await call(world.handle("nobody"))
    with pytest.raises(NotFound, match="application 'nobody'"):
        await call(DeploymentHandle("", "nobody"))


async def test_getting_a_handle_of_what_is_not_there_raises_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "ENDPOINT_GRACE_S", 0.05)
    assert (await asyncio.to_thread(get_deployment_handle, "a", "default")).deployment_name == "a"
    with pytest.raises(RayServeException, match=r"^Application 'nobody' does not exist\.$"):
        await asyncio.to_thread(get_app_handle, "nobody")
    words = r"^Deployment\(name='nobody', app='default'\) does not exist\.$"
    with pytest.raises(KeyError, match=words) as unknown:
        await asyncio.to_thread(get_deployment_handle, "nobody", "default")
    assert isinstance(unknown.value, NotFound)
    get_deployment_handle("nobody", "default", False)


async def test_a_handle_of_what_is_deployed_meanwhile_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "ENDPOINT_GRACE_S", 30.0)
    async with asyncio.TaskGroup() as tasks:
        found = tasks.create_task(asyncio.to_thread(get_deployment_handle, "late", "default"))
        while not world.router._changed._waiters:  # type: ignore[attr-defined]  # noqa: ASYNC110 - until it waits
            await asyncio.sleep(0.001)
        world.deploy("default/late", whole=False)
    assert found.result().deployment_name == "late"


async def test_a_handle_is_not_found_before_the_bucket_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "BUCKET_WAIT_S", 0.05)
    world = make_world(monkeypatch)
    world.router.routing_error = "nobody is there"
    with pytest.raises(BusUnavailable, match="nobody is there"):
        await asyncio.to_thread(get_app_handle, "shop")
    world.router.fail_all(BusUnavailable("refused"))
    with pytest.raises(BusUnavailable, match="refused"):
        await asyncio.to_thread(get_app_handle, "shop")


async def test_a_call_that_waited_for_the_bucket_does_not_wait_as_long_for_its_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(monkeypatch)
    monkeypatch.setattr(router, "BUCKET_WAIT_S", 3600.0)
    monkeypatch.setattr(router, "ENDPOINT_GRACE_S", 0.01)
    response = call(world.handle("nobody"))
    await world.settle()
    world.deploy("default/a")
    with pytest.raises(NotFound, match="default/nobody"):
        async with asyncio.timeout(30):
            await response


async def test_a_bucket_that_is_not_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "BUCKET_WAIT_S", 0.01)
    world = make_world(monkeypatch)
    world.router.routing_error = "nobody is there"
    with pytest.raises(BusUnavailable, match="nobody is there"):
        await call(world.handle())


async def test_what_can_never_work_fails_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch)
    early = call(world.handle())
    await world.settle()
    world.router.fail_all(BusUnavailable("refused"))
    for response in (early, call(world.handle())):
        with pytest.raises(BusUnavailable, match="refused"):
            await response


async def test_only_so_many_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "WAITING_MAX", 2)
    world = make_world(monkeypatch)
    responses = [call(world.handle()) for _ in range(3)]
    with pytest.raises(BusUnavailable, match="2 calls wait already"):
        await responses[2]


# Handles find their stack as the command line does, and come as a user of their own.


@pytest.fixture
def password(tmp_path: Path) -> str:
    return generate(tmp_path / "secrets", plain=True).read("nats_client")


def test_credentials_lie_with_the_stack_that_is_found(tmp_path: Path) -> None:
    secrets = generate(tmp_path / "secrets")
    (tmp_path / "deep" / "down").mkdir(parents=True)
    admins = {"MUSTER_NATS_CREDS_FILE": str(secrets.credentials_file(Role.ADMIN))}
    for variables in ({}, admins):
        bus = find_bus_outside_replica(variables, tmp_path / "deep" / "down")
        assert bus.servers == ["nats://127.0.0.1:4222"]
        assert bus.credentials == CredentialsFile(str(secrets.credentials_file(Role.CLIENT)))
        assert (bus.inbox_prefix, bus.subject_prefix) == ("_INBOX_client", "serve")


def test_credentials_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "given.creds"
    file.touch()
    bus = find_bus_outside_replica(
        {"MUSTER_NATS_URL": "nats://elsewhere", "MUSTER_CLIENT_CREDS_FILE": str(file)}, tmp_path
    )
    assert (bus.servers, bus.credentials) == (["nats://elsewhere:4222"], CredentialsFile(str(file)))


def test_the_password_lies_with_the_stack_that_is_found(tmp_path: Path, password: str) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    bus = find_bus_outside_replica({}, tmp_path / "deep" / "down")
    assert (bus.servers, bus.user, bus.password) == (["nats://127.0.0.1:4222"], "client", password)
    assert (bus.inbox_prefix, bus.subject_prefix) == ("_INBOX_client", "serve")


def test_an_admins_credentials_are_not_the_handles(tmp_path: Path, password: str) -> None:
    variables = {
        "MUSTER_NATS_URL": "nats://admin:hunter22@localhost:4300",
        "MUSTER_NATS_USER": "admin",
        "MUSTER_NATS_PASSWORD": "hunter22",
    }
    bus = find_bus_outside_replica(variables, tmp_path)
    assert (bus.servers, bus.user, bus.password) == (["nats://localhost:4300"], "client", password)


def test_a_password_never_goes_to_another_machine(tmp_path: Path, password: str) -> None:
    assert find_bus_outside_replica({"MUSTER_NATS_URL": "nats://elsewhere:4222"}, tmp_path).password == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"MUSTER_NATS_URL": "nats://client:secret-1@elsewhere"},
        {"MUSTER_NATS_URL": "nats://elsewhere", "MUSTER_CLIENT_PASSWORD": "secret-1"},
        {"MUSTER_NATS_URL": "nats://client:old@elsewhere", "MUSTER_CLIENT_PASSWORD": "secret-1"},
    ],
)
def test_a_password_may_be_given(tmp_path: Path, variables: dict[str, str]) -> None:
    bus = find_bus_outside_replica(variables, tmp_path)
    assert (bus.servers, bus.password) == (["nats://elsewhere:4222"], "secret-1")


def test_a_password_may_come_from_a_file_and_the_user_have_another_name(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("secret-1\n")
    variables = {
        "MUSTER_NATS_URL": "nats://elsewhere",
        "MUSTER_CLIENT_USER": "team-a",
        "MUSTER_CLIENT_PASSWORD_FILE": str(tmp_path / "given"),
    }
    bus = find_bus_outside_replica(variables, tmp_path)
    assert (bus.user, bus.password) == ("team-a", "secret-1")


def test_no_stack_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match="no stack was found"):
        find_bus_outside_replica({}, tmp_path)


def test_a_replica_uses_its_own_bus() -> None:
    bus = BusSettings(
        servers=["nats://x"], user="replica", password="p", inbox_prefix="_INBOX_replica", subject_prefix="s"
    )
    context = CurrentReplica(
        replica_tag=ReplicaTag("a/b#0"),
        backend_tag=BackendTag("a/b"),
        bus=bus,
        code_version=1,
        peer_versions={},
    )
    set_replica_context(context)
    try:
        assert find_bus() is bus
    finally:
        set_replica_context(None)


# The parts of handles between threads: items cut anywhere, wakers that are never lost.


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(0, 60)))
def test_items_come_whole_wherever_their_bytes_are_cut(items: list[bytes], cuts: list[int]) -> None:
    data = b"".join(len(item).to_bytes(4, "big") + item for item in items)
    reader, found = ItemReader(), []
    sizes = iter(cuts)
    while data:
        size = next(sizes, 7)
        piece, data = data[:size], data[size:]
        reader.feed(memoryview(piece))
        while (item := reader.next_item()) is not None:
            found.append(bytes(item))
    assert found == items
    assert reader.is_between_items


def test_an_item_above_the_limit_is_refused_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "BODY_BYTES_MAX", 100)
    reader = ItemReader()
    reader.feed(memoryview((101).to_bytes(4, "big")))
    with pytest.raises(ResponseUnusable, match="at most 100"):
        reader.next_item()


def test_a_thread_is_woken_however_it_meets_what_it_waits_for() -> None:
    for _ in range(300):
        wakers, happened = Wakers(), threading.Event()

        def happen(wakers: Wakers = wakers, happened: threading.Event = happened) -> None:
            happened.set()
            wakers.wake()

        other = threading.Thread(target=happen)
        other.start()
        assert wait_in_thread(wakers, happened.is_set, 30)
        other.join()


async def test_every_waiter_of_a_loop_is_woken_by_another_thread() -> None:
    waiters = [make_waiter() for _ in range(200)]

    def wake() -> None:
        for _, waker in waiters:
            waker()

    other = threading.Thread(target=wake)
    other.start()
    async with asyncio.timeout(30):
        for waiter, _ in waiters:
            await waiter
    other.join()


def test_a_mailbox_of_a_closed_loop_says_that_nobody_takes() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop, lambda _value: None)
    loop.close()
    assert not mailbox.put(1)


class ObjectRef:
    """Ray's, as far as handles use it."""

    __module__ = "ray"

    def __init__(self) -> None:
        self.value: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.value


async def test_the_value_of_a_ray_object_travels_once_it_is_there(world: World) -> None:
    now, later = ObjectRef(), ObjectRef()
    now.value.set_result({"a": 1})
    response = call(world.handle(), now, "plain", other=later)
    await asyncio.sleep(0)
    later.value.set_result([2])
    sent = await world.sent()
    assert sent.arguments == (({"a": 1}, "plain"), {"other": [2]})
    sent.answer("done")
    assert await response == "done"


async def test_a_ray_task_that_failed_fails_the_call_with_its_exception(world: World) -> None:
    failed, unpicklable = ObjectRef(), ObjectRef()
    error = RuntimeError("RayTaskError")
    error.cause = KeyError("of the task")  # type: ignore[attr-defined]
    failed.value.set_exception(error)
    with pytest.raises(KeyError, match="of the task"):
        await call(world.handle(), failed)
    unpicklable.value.set_result(threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        await call(world.handle(), unpicklable)
    assert world.is_idle
