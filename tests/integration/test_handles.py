"""Handles with a real nats-server and real replicas: chains, streams, cancellation, versions."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muster.exceptions import RayServeException
from muster.handles import (
    DeploymentHandle,
    DeploymentResponseGenerator,
    RequestCancelledError,
    get_app_handle,
    get_deployment_handle,
)
from muster.handles import runtime as handle_runtime
from serve_common.errors import (
    BusAuthorizationFailed,
    BusUnavailable,
    DeadlineExceeded,
    NotFound,
    UserCodeRaised,
)
from serve_common.identities.credentials import (
    CredentialsFile,
    encode_credentials_file,
    parse_credentials_file,
)
from serve_common.identities.roles import Role
from serve_common.names import BackendTag
from serve_common.nats.client import connect_nats
from serve_common.protocol.reports import Wake
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.runtime.settings import BusSettings
from serve_replica_host.adapters.metrics_files import MetricsFiles
from tests.support.servers.nats_server import until_known
from tests.support.stacks.handle_stack import APP_DIR, SUBJECTS, GuardedNats, HandleStack
from tests.support.waiting import until

LEAF, MIDDLE, ROLLED = "default/leaf", "default/middle", "default/rolled"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandleStack]:
    nats = GuardedNats(tmp_path_factory.mktemp("nats"))
    stack = HandleStack(nats)
    try:
        leaves = (f"{LEAF}#0", f"{ROLLED}#0", f"{ROLLED}#1")
        stack.start(*(stack.order("Leaf", tag) for tag in leaves))
        stack.start(stack.order("Ingress", "default/ingress#0"))
        stack.start(stack.order("Middle", f"{MIDDLE}#0", peer_versions={BackendTag(ROLLED): 2}))
        versions = {f"{ROLLED}#0": 1, f"{ROLLED}#1": 2}
        replicas = {
            LEAF: leaves[:1],
            ROLLED: leaves[1:],
            MIDDLE: [f"{MIDDLE}#0"],
            "default/ingress": ["default/ingress#0"],
        }
        asyncio.run(stack.write_bucket(replicas, versions))
        stack.wait_ready()
        handle_runtime.use(nats.settings(Role.CLIENT))
        yield stack
    finally:
        handle_runtime.disconnect()
        stack.close()
        nats.close()


@pytest.fixture
def leaf(stack: HandleStack) -> DeploymentHandle:
    return get_deployment_handle("leaf", "default")


@pytest.fixture
def middle(stack: HandleStack) -> DeploymentHandle:
    return get_deployment_handle("middle", "default")


def stream(handle: DeploymentHandle, *args: Any) -> DeploymentResponseGenerator:
    response = handle.options(stream=True).remote(*args)
    assert isinstance(response, DeploymentResponseGenerator)
    return response


async def test_a_call_from_outside_brings_its_value(leaf: DeploymentHandle) -> None:
    assert await leaf.remote({"a": (1, b"x")}) == {"a": (1, b"x")}
    assert await leaf.greet.remote("Ada", greeting="hi") == "hi Ada"


def test_a_plain_program_calls_plain_methods(leaf: DeploymentHandle) -> None:
    assert leaf.plain.remote("ab", times=2).result(timeout_s=30) == "abab"


async def test_many_calls_at_once_all_come_back(leaf: DeploymentHandle) -> None:
    responses = [leaf.remote(number) for number in range(90)]
    assert [await response for response in responses] == list(range(90))


async def test_a_chain_of_two_deployments_answers(middle: DeploymentHandle) -> None:
    assert await middle.remote(7) == [7]
    assert await middle.plain.remote("ab") == "abab"
    assert await middle.composed.remote("Ada") == "oh, hello Ada"
    assert await get_app_handle("default").remote(8) == [8]


async def test_blocking_the_loop_of_a_replica_is_refused(middle: DeploymentHandle) -> None:
    with pytest.raises(RuntimeError, match="await response"):
        await middle.blocked.remote()


async def test_arguments_and_values_may_be_large(leaf: DeploymentHandle) -> None:
    assert await leaf.size.remote(bytes(5 * MIB)) == 5 * MIB
    assert len(await leaf.make.remote(5 * MIB)) == 5 * MIB
    assert await leaf.size.remote(leaf.make.remote(3 * MIB)) == 3 * MIB


@pytest.fixture
def importable_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The deployments' module can be imported here too."""
    monkeypatch.syspath_prepend(APP_DIR)
    yield
    sys.modules.pop("handle_app", None)


async def test_an_exception_crosses_two_replicas_as_itself(
    middle: DeploymentHandle, importable_app: None
) -> None:
    with pytest.raises(ValueError, match="no such digit") as caught:
        await middle.known.remote()
    assert type(caught.value).__name__ == "Known"
    (note,) = caught.value.__notes__
    assert note.count("Remote traceback:") == 2
    assert note.startswith("Remote traceback:")
    assert "await self.leaf.known.remote()" in note
    assert 'raise Known("no such digit")' in note


async def test_what_cannot_travel_is_told_in_words(leaf: DeploymentHandle) -> None:
    with pytest.raises(UserCodeRaised, match="Known: no such digit"):  # it cannot be imported here
        await leaf.known.remote()
    with pytest.raises(UserCodeRaised, match="digit was refused with 7") as caught:
        await leaf.refused.remote()
    assert 'raise Refused("digit", 7)' in caught.value.__notes__[0]
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        await leaf.nothing_to_pickle.remote()
    with pytest.raises(UserCodeRaised, match="SystemExit: 3"):
        await leaf.leave.remote()


async def test_a_deployment_that_is_not_there_is_told_soon(stack: HandleStack) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(NotFound, match="default/nobody"):
            await get_deployment_handle("nobody", "default", _check_exists=False).remote()
        with pytest.raises(KeyError, match="does not exist"):
            get_deployment_handle("nobody", "default")
        with pytest.raises(RayServeException, match="Application 'nobody' does not exist"):
            get_app_handle("nobody")


async def test_a_stream_is_read_on_a_loop_and_in_a_thread(
    leaf: DeploymentHandle, middle: DeploymentHandle
) -> None:
    for method in (leaf.numbers, leaf.plain_numbers):
        assert [number async for number in stream(method, 1000)] == list(range(1000))
        assert await asyncio.to_thread(list, stream(method, 1000)) == list(range(1000))
    assert [number async for number in stream(middle.numbers, 5)] == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("method", ["number", "plain_number"])
async def test_a_stream_of_no_generator_and_a_generator_without_stream_are_type_errors(
    leaf: DeploymentHandle, method: str
) -> None:
    with pytest.raises(TypeError, match=f"Called method '{method}' .* did not return a generator"):
        [item async for item in stream(getattr(leaf, method))]
    with pytest.raises(TypeError, match=f"Method '{method}s' returned a generator"):
        await getattr(leaf, f"{method}s").remote(3)


async def test_methods_of_an_ingress_are_called_and_streamed(stack: HandleStack) -> None:
    ingress = get_deployment_handle("ingress", "default")
    assert await ingress.number.remote(7) == 7
    for method in (ingress.numbers, ingress.plain_numbers):
        assert [number async for number in stream(method, 3)] == [0, 1, 2]


async def test_every_running_replica_is_called_once_from_outside_and_within(
    middle: DeploymentHandle, stack: HandleStack
) -> None:
    rolled = get_deployment_handle("rolled", "default")
    assert rolled.is_initialized
    assert rolled.running_replicas_populated()
    everyone = [f"{ROLLED}#0", f"{ROLLED}#1"]
    assert sorted(await rolled.broadcast("who").results_async(timeout_s=30)) == everyone
    assert sorted(await asyncio.to_thread(rolled.broadcast("who").results, timeout_s=30)) == everyone
    assert sorted(await middle.everyone.remote()) == everyone
    greetings = await rolled.broadcast("greet", "Ada", greeting="hi").results_async(timeout_s=30)
    assert greetings == ["hi Ada"] * 2
    failures = await rolled.broadcast("leave").results_async(timeout_s=30, return_exceptions=True)
    assert [type(failure) for failure in failures] == [UserCodeRaised] * 2
    with pytest.raises(UserCodeRaised, match="SystemExit: 3"):
        await asyncio.to_thread(rolled.broadcast("leave").results)


async def test_a_stream_that_breaks_gives_its_items_first(leaf: DeploymentHandle) -> None:
    response = stream(leaf.broken_numbers)
    assert await anext(response) == 1
    with pytest.raises(UserCodeRaised, match="after one"):
        await anext(response)


async def until_counted(leaf: DeploymentHandle, started: int, cancelled: int) -> None:
    """Until so many have begun and been cancelled; another process is asked again until it says so."""
    async with asyncio.timeout(30):
        while await leaf.counts.remote() != (started, cancelled):  # noqa: ASYNC110 - as said
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("method", ["hold", "hold_unawaited", "hold_plain"])
async def test_cancelling_goes_down_the_chain_at_once(
    leaf: DeploymentHandle, middle: DeploymentHandle, method: str
) -> None:
    started, cancelled = await leaf.counts.remote()
    response = getattr(middle, method).remote()
    await until_counted(leaf, started + 1, cancelled)
    response.cancel()
    with pytest.raises(RequestCancelledError):
        await response
    await until_counted(leaf, started + 1, cancelled + 1)


async def test_a_deadline_goes_down_the_chain(leaf: DeploymentHandle, middle: DeploymentHandle) -> None:
    started, cancelled = await leaf.counts.remote()
    begun, ended, timeout_s = started, cancelled, 1.0
    async with asyncio.timeout(40):  # by itself it would hold for a minute
        while begun == started or ended - cancelled < begun - started:
            if begun == started:  # at first, and where the deadline was over before the call was down there
                with pytest.raises(DeadlineExceeded):
                    await middle.options(timeout_s=timeout_s).hold.remote()
                timeout_s *= 2
            begun, ended = await leaf.counts.remote()
    context = RequestContext(request_id="r-chain", deadline=time.monotonic() + 40)
    token = request_context.set(context)
    try:
        response = middle.seen.remote()
    finally:
        request_context.reset(token)
    outer_id, (inner_id, left_s, _) = await response
    assert (outer_id, inner_id) == ("r-chain", "r-chain")
    assert 10 < left_s <= 40


async def test_what_a_call_further_down_ended_with_is_told_by_its_own_kind(
    leaf: DeploymentHandle, middle: DeploymentHandle, importable_app: None
) -> None:
    with pytest.raises(DeadlineExceeded) as late:
        await middle.impatient.remote()
    async with asyncio.timeout(30):
        while len(set(await leaf.counts.remote())) != 1:  # lest the next test count its end  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="no such digit"):
        await middle.known.remote()
    assert late.value.is_of_call


async def test_leaving_a_stream_ends_its_generator(leaf: DeploymentHandle) -> None:
    started, cancelled = await leaf.counts.remote()
    response = stream(leaf.endless)
    assert len(await anext(response)) == 10_000
    await until_counted(leaf, started + 1, cancelled)
    del response
    await until_counted(leaf, started + 1, cancelled + 1)


async def test_the_model_of_a_call_reaches_the_code(leaf: DeploymentHandle) -> None:
    _, _, model_id = await leaf.options(multiplexed_model_id="m1").seen.remote()
    assert model_id == "m1"


async def test_a_chain_keeps_to_the_version_that_it_belongs_to(middle: DeploymentHandle) -> None:
    assert await middle.who.remote() == [f"{ROLLED}#1"] * 8
    outside = {await get_deployment_handle("rolled", "default").who.remote() for _ in range(40)}
    assert outside == {f"{ROLLED}#0", f"{ROLLED}#1"}


@pytest.fixture
def elsewhere(stack: HandleStack) -> Iterator[Callable[[BusSettings], None]]:
    """Connects this process' handles in another way, for one test."""
    yield handle_runtime.use
    handle_runtime.use(stack.nats.settings(Role.CLIENT))


async def test_calls_from_outside_and_inside_wake_a_deployment_that_was_scaled_to_zero(
    stack: HandleStack, leaf: DeploymentHandle, middle: DeploymentHandle
) -> None:
    controller = await connect_nats(stack.nats.settings(Role.CONTROLLER), name="test", deadline_s=20.0)
    said = await controller.subscribe(SUBJECTS.wakes)
    await until_known(controller)
    await stack.write_bucket({LEAF: []})
    router = handle_runtime.runtime()._parts.router._routes.router(BackendTag(LEAF))
    until(lambda: router.is_scaled_to_zero)
    outside = leaf.remote(1)
    wake = msgspec.json.decode((await said.next_msg(20)).data, type=Wake)
    assert wake == Wake(backend_tag=LEAF, waiting=1)
    outside.cancel()
    until(lambda: router.queue_depth == 0)
    # What is asked now on the same connection is answered after all that this process has said of the call.
    await get_deployment_handle("rolled", "default").who.remote()
    await until_known(controller)
    while said.pending_msgs:
        await said.next_msg(1)
    files = MetricsFiles(stack.metrics_dir)
    waited_before_s = waited_s(files)

    async def ask_inside() -> Any:
        return await middle.remote(2)

    async with asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(said.next_msg(40))
        inside = tasks.create_task(ask_inside())
        started_at = time.monotonic()
        while not hearing.done():
            await asyncio.wait({hearing, inside}, return_when=asyncio.FIRST_COMPLETED)
            if inside.done():  # that process has not heard yet that the deployment sleeps
                started_at = time.monotonic()
                inside = tasks.create_task(ask_inside())
        assert msgspec.json.decode(hearing.result().data, type=Wake) == Wake(backend_tag=LEAF, waiting=1)
        await said.next_msg(20)  # it is said again
        await stack.write_bucket({LEAF: [f"{LEAF}#0"]})
        assert await inside == [2]
        took_s = time.monotonic() - started_at
    await controller.close()

    def waited_for(tag: str) -> float:
        return waited_s(files).get(tag, 0.0) - waited_before_s.get(tag, 0.0)

    until(lambda: waited_for(LEAF) >= 0.9)
    assert waited_for(LEAF) <= took_s + 0.1
    assert waited_for(ROLLED) == 0.0


def waited_s(files: MetricsFiles) -> dict[str, float]:
    """What the replicas' processes say of the waiting of their own calls."""
    return {
        sample.labels["backend_tag"]: sample.value
        for metric in files.collect()
        for sample in metric.samples
        if sample.name == "serve_router_queued_seconds_total"
    }


@pytest.mark.parametrize("seed_of", [Role.ADMIN, Role.CLIENT])
async def test_who_may_not_call_replicas_is_told(
    stack: HandleStack, elsewhere: Callable[[BusSettings], None], tmp_path: Path, seed_of: Role
) -> None:
    """An admin may not, and whoever has a client's token without its seed is nobody."""
    jwt, _ = parse_credentials_file(stack.nats.secrets.credentials_file(seed_of).read_text())
    _, seed = parse_credentials_file(stack.nats.secrets.credentials_file(Role.ADMIN).read_text())
    file = tmp_path / "wrong.creds"
    file.write_text(encode_credentials_file(jwt, seed))
    right = stack.nats.settings(Role.CLIENT)
    elsewhere(msgspec.structs.replace(right, credentials=CredentialsFile(str(file))))
    with pytest.raises(BusAuthorizationFailed, match="user"):
        await get_deployment_handle("leaf", "default").remote()


async def test_a_stack_that_is_not_there_is_told(
    elsewhere: Callable[[BusSettings], None], stack: HandleStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.handles.router.BUCKET_WAIT_S", 0.1)
    elsewhere(msgspec.structs.replace(stack.nats.settings(Role.CLIENT), servers=["nats://127.0.0.1:9"]))
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:9 does not answer"):
        await get_deployment_handle("leaf", "default").remote()


async def test_calls_under_way_end_with_the_connection(
    leaf: DeploymentHandle, elsewhere: Callable[[BusSettings], None], stack: HandleStack
) -> None:
    started, cancelled = await leaf.counts.remote()
    response = leaf.hold.remote()
    await until_counted(leaf, started + 1, cancelled)
    elsewhere(stack.nats.settings(Role.CLIENT))
    with pytest.raises(BusUnavailable, match="no longer calls"):
        await asyncio.wait_for(response, 30)
    await until_counted(leaf, started + 1, cancelled + 1)


async def test_calls_that_wait_for_the_connection_end_with_it(
    leaf: DeploymentHandle, elsewhere: Callable[[BusSettings], None], stack: HandleStack
) -> None:
    elsewhere(msgspec.structs.replace(stack.nats.settings(Role.CLIENT), servers=["nats://127.0.0.1:9"]))
    response = leaf.hold.remote()
    elsewhere(stack.nats.settings(Role.CLIENT))
    with pytest.raises(BusUnavailable, match="no longer calls"):
        await asyncio.wait_for(response, 30)
    assert await leaf.remote(1) == 1
