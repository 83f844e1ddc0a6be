"""`batch` on a real event loop: who is batched with whom, who fails alone, and that nothing gets stuck."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import pickle
import time
import weakref
from types import SimpleNamespace

import cloudpickle
import pytest

import muster as serve
from muster.batching import batches as batcher
from muster.batching.batches import Batcher
from muster.batching.calls import BUFFERED_STEPS_MAX
from serve_common.errors import DeadlineExceeded
from serve_common.runtime import request_context as request_context_module
from serve_common.runtime.request_context import RequestContext, request_context
from tests.support.waiting import eventually

LONG_S = 30.0
"""A wait that no test sits through."""


class Model:
    """Remembers its batches; each waits for its gate where there is one."""

    def __init__(self) -> None:
        self.batches: list[list] = []
        self.gate: asyncio.Event | None = None
        self.began = asyncio.Event()
        self.cancelled = 0

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.005)
    async def double(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        self.began.set()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return [ValueError(f"odd {item}") if item % 2 else item * 2 for item in items]


def start(coro) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(coro)


async def ended(*tasks: asyncio.Task) -> None:
    async with asyncio.timeout(30):
        await asyncio.wait(tasks)


async def test_calls_are_put_together_up_to_the_maximum_and_each_gets_its_own_result() -> None:
    model = Model()
    results = await asyncio.gather(*(model.double(item) for item in (0, 2, 4, 6, 8, 10, 12)))
    assert results == [0, 4, 8, 12, 16, 20, 24]
    assert model.batches == [[0, 2, 4], [6, 8, 10], [12]]


async def test_each_instance_has_a_queue_of_its_own() -> None:
    one, two = Model(), Model()
    assert await asyncio.gather(one.double(2), two.double(4), one.double(6)) == [4, 8, 12]
    assert one.batches == [[2, 6]]
    assert two.batches == [[4]]


async def test_an_exception_among_the_results_fails_its_own_caller_only() -> None:
    model = Model()
    results = await asyncio.gather(*map(model.double, (2, 3, 4)), return_exceptions=True)
    assert results[0] == 4
    assert isinstance(results[1], ValueError)
    assert str(results[1]) == "odd 3"
    assert results[2] == 8


async def test_in_a_program_of_ray_serves_form_an_exception_among_the_results_is_a_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_context_module, "_current", SimpleNamespace(is_program=True))
    results = await asyncio.gather(*map(Model().double, (2, 3)))
    assert results[0] == 4
    assert isinstance(results[1], ValueError)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), OSError(2, "gone")])
async def test_what_the_function_raises_is_raised_at_all_callers_and_the_next_batch_runs(error) -> None:
    is_broken = True

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def work(items):
        if is_broken:
            raise error
        return items

    results = []

    async def call(item):
        try:
            results.append(await work(item))
        except BaseException as raised:
            results.append(raised)

    await asyncio.gather(call(1), call(2))
    assert results == [error, error]
    is_broken = False
    assert await asyncio.gather(work(1), work(2)) == [1, 2]


async def test_stop_iteration_as_a_result_and_a_function_that_cancels_itself_are_errors_that_say_so() -> None:
    @serve.batch(max_batch_size=1)
    async def odd(items):
        if items[0] == "cancel":
            raise asyncio.CancelledError
        return [StopIteration("x")]

    with pytest.raises(RuntimeError, match="failed with StopIteration"):
        await odd("stop")
    with pytest.raises(RuntimeError, match="failed with CancelledError"):
        await odd("cancel")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], "has length 2 but the returned list has length 1"),
        ([1, 2, 3], "has length 2 but the returned list has length 3"),
        (None, "a value of type NoneType for a batch of 2"),
        ("ab", "a value of type str"),
        ({1: 1, 2: 2}, "a value of type dict"),
    ],
)
async def test_a_wrong_number_of_results_fails_everybody_clearly(returned, message: str) -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def work(items):
        return returned

    results = await asyncio.gather(work(1), work(2), return_exceptions=True)
    assert all(isinstance(result, serve.WrongBatchResult) for result in results)
    assert message in str(results[0])
    assert isinstance(returned, list) or "work" in str(results[0])
    assert isinstance(results[0], TypeError) is not isinstance(returned, list), "as in Ray Serve"


async def test_who_is_cancelled_while_waiting_never_reaches_the_function() -> None:
    model = Model()
    model.double.set_batch_wait_timeout_s(LONG_S)
    try:
        calls = [start(model.double(item)) for item in (2, 4)]
        await asyncio.sleep(0)
        calls[0].cancel()
        await ended(calls[0])
        calls += [start(model.double(item)) for item in (6, 8)]
        await ended(*calls)
    finally:
        model.double.set_batch_wait_timeout_s(0.005)
    assert model.batches == [[4, 6, 8]]


async def test_who_is_cancelled_behind_a_running_batch_never_reaches_the_function() -> None:
    model = Model()
    model.gate = asyncio.Event()
    first = [start(model.double(2)) for _ in range(3)]
    await model.began.wait()
    second = [start(model.double(item)) for item in (4, 6)]
    await asyncio.sleep(0.02)
    assert model.batches == [[2, 2, 2]]
    second[0].cancel()
    await ended(second[0])
    model.gate.set()
    await ended(*first, *second)
    assert model.batches == [[2, 2, 2], [6]]


async def test_a_batch_whose_callers_are_all_gone_is_cancelled_and_the_next_one_runs() -> None:
    model = Model()
    model.gate = asyncio.Event()
    calls = [start(model.double(2)) for _ in range(3)]
    await model.began.wait()
    calls[0].cancel()
    calls[1].cancel()
    await ended(*calls[:2])
    assert model.cancelled == 0
    calls[2].cancel()
    await ended(calls[2])
    model.gate.set()
    assert await model.double(4) == 8
    assert model.cancelled == 1


async def test_callers_gone_in_the_moment_in_which_the_batch_begins_leave_nothing_behind() -> None:
    model = Model()
    for turns in range(8):
        calls = [start(model.double(item)) for item in (2, 4, 6)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await ended(*calls)
        async with asyncio.timeout(30):
            assert await model.double(100) == 200


async def test_a_function_that_ignores_its_cancellation_keeps_its_place_until_it_ends() -> None:
    gate, began, running = asyncio.Event(), asyncio.Event(), []

    @serve.batch(max_batch_size=1)
    async def stubborn(items):
        running.append(items[0])
        began.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        return items

    first = start(stubborn(1))
    await began.wait()
    first.cancel()
    await ended(first)
    second = start(stubborn(2))
    await asyncio.sleep(0.03)
    assert running == [1]
    gate.set()
    assert await second == 2


async def test_as_many_batches_run_at_once_as_are_allowed() -> None:
    gate, most, running = asyncio.Event(), 0, 0

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0, max_concurrent_batches=2)
    async def work(items):
        nonlocal most, running
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return items

    calls = [start(work(item)) for item in range(10)]
    await eventually(lambda: most >= 2)
    await asyncio.sleep(0.02)
    assert most == 2
    gate.set()
    assert await asyncio.gather(*calls) == list(range(10))
    assert most == 2


async def test_a_single_caller_waits_the_timeout_and_no_longer() -> None:
    model = Model()
    began = time.perf_counter()
    assert await model.double(2) == 4
    assert 0.004 < time.perf_counter() - began < LONG_S


async def test_without_a_timeout_what_comes_together_still_goes_together() -> None:
    batches = []

    @serve.batch(batch_wait_timeout_s=0)
    async def work(items):
        batches.append(items)
        return items

    await asyncio.gather(*(work(item) for item in range(4)))
    assert batches == [[0, 1, 2, 3]]


async def test_nothing_runs_and_no_timer_is_set_while_nobody_calls(monkeypatch) -> None:
    model = Model()
    await model.double(2)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not [handle for handle in loop._scheduled if not handle.cancelled() and "Batcher" in repr(handle)]


# -- sizes --


async def test_items_are_batched_by_the_size_that_the_function_says_in_the_order_of_their_arrival() -> None:
    batches = []

    @serve.batch(
        max_batch_size=10, batch_wait_timeout_s=0.005, batch_size_fn=lambda items: sum(map(len, items))
    )
    async def work(items):
        batches.append(items)
        return items

    texts = ["aaaa", "bbbb", "cccc", "x" * 50, "d", "e"]
    assert await asyncio.gather(*map(work, texts)) == texts
    assert batches == [["aaaa", "bbbb"], ["cccc"], ["x" * 50], ["d", "e"]]


@pytest.mark.parametrize("bad", [None, "3", -1, float("nan"), [1]])
async def test_a_size_that_is_none_fails_its_own_caller_and_the_queue_goes_on(bad) -> None:
    @serve.batch(
        max_batch_size=3,
        batch_wait_timeout_s=0.005,
        batch_size_fn=lambda items: bad if "bad" in items and len(items) == 1 else len(items),
    )
    async def work(items):
        return items

    if bad == "3":
        assert await work("bad") == "bad"  # a number is a number
        return
    results = await asyncio.gather(work("bad"), work("a"), work("b"), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert "batch_size_fn returned" in str(results[0])
    assert results[1:] == ["a", "b"]


async def test_a_size_function_that_raises_fails_only_the_caller_of_that_item() -> None:
    @serve.batch(
        max_batch_size=3, batch_wait_timeout_s=0.005, batch_size_fn=lambda items: sum(map(len, items))
    )
    async def work(items):
        return items

    results = await asyncio.gather(work("a"), work(None), work("b"), return_exceptions=True)
    assert results[0] == "a"
    assert isinstance(results[1], TypeError)
    assert results[2] == "b"


async def test_items_that_can_be_sized_only_apart_are_batched_apart() -> None:
    batches = []

    def size(items) -> int:
        if len({type(item) for item in items}) > 1:
            raise TypeError("mixed")
        return len(items)

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.005, batch_size_fn=size)
    async def work(items):
        batches.append(items)
        return items

    assert await asyncio.gather(work(1), work("a"), work("b"), work(2)) == [1, "a", "b", 2]
    assert batches == [[1], ["a", "b"], [2]]


async def test_the_maximum_can_be_changed_and_what_waits_goes_by_the_new_one() -> None:
    batches = []

    @serve.batch(max_batch_size=100, batch_wait_timeout_s=LONG_S)
    async def work(items):
        batches.append(items)
        return items

    assert (work.get_max_batch_size(), work.get_batch_wait_timeout_s()) == (100, LONG_S)
    calls = [start(work(item)) for item in range(5)]
    await asyncio.sleep(0.01)
    assert batches == []
    work.set_max_batch_size(2)
    await ended(*calls[:4])
    assert batches == [[0, 1], [2, 3]]
    await asyncio.to_thread(work.set_batch_wait_timeout_s, 0)
    await ended(calls[4])
    assert (work._get_max_batch_size(), work._get_batch_wait_timeout_s()) == (2, 0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_batch_size": 0}, ValueError),
        ({"max_batch_size": 1.5}, TypeError),
        ({"max_batch_size": True}, TypeError),
        ({"batch_wait_timeout_s": -1}, ValueError),
        ({"batch_wait_timeout_s": float("inf")}, ValueError),
        ({"batch_wait_timeout_s": "1"}, TypeError),
        ({"max_concurrent_batches": 0}, TypeError),
        ({"batch_size_fn": 3}, TypeError),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, error) -> None:
    with pytest.raises(error, match=next(iter(options))):
        serve.batch(**options)
    assert serve.batch(max_batch_size=4.0)


def test_what_cannot_be_batched_is_refused() -> None:
    with pytest.raises(TypeError, match="async def"):
        serve.batch(lambda items: items)

    async def variadic(*items):
        return items

    with pytest.raises(TypeError, match="must name its parameters"):
        serve.batch(variadic)


async def test_a_function_without_parameters_is_batched_by_the_number_of_its_calls() -> None:
    """As in Ray Serve, whose own tests declare such."""

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def nothing():
        return ["first", "second"]

    assert await asyncio.gather(nothing(), nothing()) == ["first", "second"]
    with pytest.raises(TypeError, match="too many positional arguments"):
        await nothing(1)


# -- arguments --


async def test_several_arguments_each_become_a_list() -> None:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.005)
    async def work(texts, languages="en", *, factor=1, unused="default"):
        return [*zip(texts, languages, factor, [unused] * len(texts), strict=True)]

    assert await asyncio.gather(work("a", "de", factor=3), work(texts="b"), work("c", factor=2)) == [
        ("a", "de", 3, "default"),
        ("b", "en", 1, "default"),
        ("c", "en", 2, "default"),
    ]


async def test_wrong_arguments_fail_their_own_caller_at_once() -> None:
    model = Model()
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError, match=r"Model\.double"):
            await model.double(*wrong)
    with pytest.raises(TypeError, match="without an instance"):
        await Model.double()
    assert model.batches == []


async def test_class_methods_and_plain_functions_in_a_class_have_queues_too() -> None:
    class Holder:
        @classmethod
        @serve.batch(batch_wait_timeout_s=0)
        async def of_class(cls, items: list) -> list:
            return [(cls.__name__, item) for item in items]

        @staticmethod
        @serve.batch(batch_wait_timeout_s=0)
        async def of_none(items: list) -> list:
            return items

    assert await Holder().of_class(1) == ("Holder", 1)
    assert await Holder.of_none(2) == 2


# -- contexts and deadlines --

USER: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


def in_request(coro_fn, *args, **fields) -> asyncio.Task:
    """A call made for a request of its own."""

    async def run():
        request_context.set(RequestContext(**fields))
        USER.set(fields.get("request_id", ""))
        return await coro_fn(*args)

    return start(run())


async def test_in_a_batch_the_contexts_of_all_are_seen_and_none_is_taken_for_all() -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def work(items):
        context = serve.get_request_context()
        ids = [one.request_id if one else None for one in serve.get_batch_request_contexts()]
        return [
            (context.request_id, context.route, context.traceparent, context.deadline, ids, USER.get())
        ] * 2

    far = time.monotonic() + 100
    fields = {"route": "/r"}
    first = in_request(work, 1, request_id="a", traceparent="t1", deadline=far, **fields)
    second = in_request(work, 2, request_id="b", traceparent="t2", deadline=far + 5, **fields)
    assert await first == await second == ("", "/r", "t1", far + 5, ["a", "b"], "nobody")
    assert serve.get_request_context() is None
    assert serve.get_batch_request_contexts() == []
    third = in_request(work, 1, request_id="a", deadline=far)
    assert (await asyncio.gather(third, start(work(2))))[0][3:5] == (None, ["a", None])


async def test_a_batch_of_one_is_the_request_itself() -> None:
    @serve.batch(max_batch_size=1)
    async def work(items):
        return [serve.get_request_context()]

    context = await in_request(work, 1, request_id="a", model_id="m")
    assert (context.request_id, context.model_id) == ("a", "m")


async def test_items_for_different_models_are_never_in_one_batch() -> None:
    batches = []

    @serve.batch(max_batch_size=10, batch_wait_timeout_s=0.005)
    async def work(items):
        batches.append((serve.get_multiplexed_model_id(), items))
        return items

    await ended(*(in_request(work, i, model_id=f"m{i % 2}") for i in range(6)))
    assert batches == [("m0", [0, 2, 4]), ("m1", [1, 3, 5])]


async def test_an_item_whose_deadline_passes_while_it_waits_never_reaches_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    model.gate = asyncio.Event()
    first = [start(model.double(2)) for _ in range(3)]
    await model.began.wait()
    now = time.monotonic()
    monkeypatch.setattr(batcher, "time", SimpleNamespace(monotonic=lambda: now))
    late = in_request(model.double, 4, deadline=now + 1)
    # Its deadline has passed already, so it belongs to an answer that has begun and may go on.
    begun = in_request(model.double, 6, deadline=now - 1)
    await asyncio.sleep(0.03)
    now += 2
    model.gate.set()
    await ended(*first, begun)
    with pytest.raises(DeadlineExceeded, match=r"Model\.double"):
        await late
    assert await begun == 12
    assert model.batches == [[2, 2, 2], [6]]


# -- streams --


async def collect(stream) -> list:
    return [step async for step in stream]


async def test_each_caller_of_a_streaming_batch_gets_its_own_steps() -> None:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def count(limits):
        for i in range(max(limits)):
            yield [i if i < limit else StopIteration for limit in limits]

    assert await asyncio.gather(*(collect(count(n)) for n in (1, 3, 2))) == [[0], [0, 1, 2], [0, 1]]


async def test_streams_that_are_read_one_after_the_other_are_of_one_batch() -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def count(limits):
        for i in range(3):
            yield [f"{i} of {limit}" for limit in limits]

    streams = [count("a"), count("b")]
    assert [await collect(stream) for stream in streams] == [
        [f"{i} of a" for i in range(3)],
        [f"{i} of b" for i in range(3)],
    ]


async def test_a_stream_that_was_never_read_holds_up_no_other() -> None:
    steps = 10 * BUFFERED_STEPS_MAX

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def count(limits):
        for i in range(steps):
            yield [i for _ in limits]

    dropped, kept = count("a"), count("b")
    del dropped
    assert await collect(kept) == list(range(steps)), "of one batch, which does not wait for the dropped one"
    dropped = count("c")
    del dropped
    await asyncio.sleep(0)
    streams = [count("d"), count("e")]
    assert await asyncio.gather(*map(collect, streams)) == [list(range(steps))] * 2


async def test_one_stream_fails_alone_and_a_function_that_raises_fails_those_that_go_on() -> None:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def work(items):
        yield ["a", "b", "c"]
        yield [ValueError("mine"), "b2", StopAsyncIteration()]
        yield [0, "b3", 0]
        raise OSError("broken")

    got: list[list] = [[], [], []]

    async def read(i: int):
        async for step in work(i):
            got[i].append(step)

    results = await asyncio.gather(*(read(i) for i in range(3)), return_exceptions=True)
    assert got == [["a"], ["b", "b2", "b3"], ["c"]]
    assert [type(result) for result in results] == [ValueError, OSError, type(None)]


async def test_a_step_of_the_wrong_length_fails_all_streams() -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def work(items):
        yield [1, 2]
        yield [1]

    results = await asyncio.gather(collect(work(1)), collect(work(2)), return_exceptions=True)
    assert all("has length 2 but the yielded list has length 1" in str(result) for result in results)


async def test_a_stream_that_nobody_reads_any_more_is_closed() -> None:
    closed = asyncio.Event()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def endless(items):
        try:
            i = 0
            while True:
                yield [i for _ in items]
                i += 1
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def read_some(n: int) -> int:
        stream = endless(n)
        async for step in stream:
            if step == n:
                await stream.aclose()
                return step
        raise AssertionError

    assert await asyncio.gather(read_some(3), read_some(5)) == [3, 5]
    async with asyncio.timeout(30):
        await closed.wait()


async def test_a_slow_reader_holds_up_the_batch_so_that_memory_stays_bounded() -> None:
    made = 0

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def tokens(items):
        nonlocal made
        for i in range(1000):
            made = i + 1
            yield [i for _ in items]

    quick, slow = tokens("quick"), tokens("slow")
    first = await asyncio.gather(anext(quick), anext(slow))
    assert first == [0, 0]
    await asyncio.sleep(0.02)
    assert made < 100
    rest = await asyncio.gather(collect(quick), collect(slow))
    assert rest == [list(range(1, 1000))] * 2


# -- life --


async def test_an_instance_is_let_go_when_nobody_has_it_any_more() -> None:
    model = Model()
    await asyncio.gather(model.double(2), model.double(3), return_exceptions=True)
    gone = weakref.ref(model)
    del model
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None
    loop = asyncio.get_running_loop()
    assert not [found for found in gc.get_objects() if type(found) is Batcher and found.loop is loop]


def test_a_function_serves_one_event_loop_after_another() -> None:
    model = Model.__new__(Model)
    model.batches, model.gate = [], None

    async def call() -> int:
        model.began = asyncio.Event()
        return await model.double(2)

    assert [asyncio.run(call()), asyncio.run(call())] == [4, 4]


def test_a_batched_function_can_be_pickled() -> None:
    @serve.batch(batch_wait_timeout_s=0)
    async def work(items):
        return items

    async def call(function):
        return await function(7)

    assert asyncio.run(call(work)) == 7
    assert asyncio.run(call(pickle.loads(cloudpickle.dumps(work)))) == 7


async def test_after_many_calls_with_cancellations_nothing_is_left() -> None:
    model = Model()
    for turn in range(60):
        calls = [start(model.double(2 * item)) for item in range(10)]
        for _ in range(turn % 6):
            await asyncio.sleep(0)
        for call in calls[turn % 3 :: 3]:
            call.cancel()
        await ended(*calls)
        assert [call.result() for call in calls if not call.cancelled()] == [
            4 * i for i, call in enumerate(calls) if not call.cancelled()
        ]
    await eventually(lambda: len(asyncio.all_tasks()) <= 1)
