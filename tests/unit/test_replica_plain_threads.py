"""Threads for plain functions, and tasks that begin at once."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest
from structlog.testing import capture_logs

from serve_replica_host.replica.user.executor import RequestTasks
from serve_replica_host.replica.user.threads import PlainThreads

variable: ContextVar[str] = ContextVar("variable", default="")


async def test_a_call_has_its_callers_context_and_returns_or_raises_what_the_function_does() -> None:
    threads = PlainThreads(2)

    def told(*args: Any, **kwargs: Any) -> Any:
        return variable.get(), args, kwargs, threading.current_thread() is threading.main_thread()

    def stops() -> None:
        raise StopIteration("early")

    variable.set("mine")
    assert await threads.run(told, 1, b=2) == ("mine", (1,), {"b": 2}, False)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="early"):
        await threads.run(stops)
    threads.close()


async def test_no_more_threads_run_than_are_allowed_and_the_rest_waits() -> None:
    threads = PlainThreads(2)
    at_once, most = 0, 0
    lock = threading.Lock()
    together = threading.Barrier(2, timeout=30)

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        together.wait()
        with lock:
            at_once -= 1

    await asyncio.wait_for(asyncio.gather(*(threads.run(work) for _ in range(10))), 40)

    assert most == 2
    threads.close()


async def test_a_cancelled_call_ends_when_its_function_does_however_often_it_is_cancelled() -> None:
    threads = PlainThreads(1)
    entered, released = threading.Event(), threading.Event()

    def blocks() -> None:
        entered.set()
        released.wait(40)

    async with asyncio.TaskGroup() as group:
        call = group.create_task(threads.run(blocks))
        await asyncio.to_thread(entered.wait, 30)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0)
        assert not call.done()
        released.set()
    assert call.cancelled()
    assert await threads.run(lambda: "next") == "next"
    threads.close()


async def test_a_closed_pool_takes_nothing_and_its_threads_end() -> None:
    threads = PlainThreads(1)
    thread = await threads.run(threading.current_thread)

    threads.close()

    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="has stopped"):
        await threads.run(print)


async def in_a_callback(call: Any) -> Any:
    """What ``call`` returns outside of any task, as in the mailbox."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()
    loop.call_soon(lambda: result.set_result(call()))
    return await result


async def test_a_task_begins_at_once_and_one_that_never_waits_is_done_at_once() -> None:
    tasks = RequestTasks()
    seen: list[Any] = []

    async def quick() -> None:
        current = asyncio.current_task()
        variable.set("inside")
        seen.append(current is not None and current.get_name())
        async with asyncio.timeout(1):  # noqa: ASYNC100 - that it works without a turn of the loop is the point
            seen.append(variable.get())

    assert await in_a_callback(lambda: (tasks.start(quick()), list(seen))) == (None, ["request", "inside"])
    assert variable.get() == ""


async def test_a_task_that_waits_goes_on_and_can_be_cancelled() -> None:
    tasks = RequestTasks()
    go = asyncio.Event()
    seen: list[str] = []

    async def waits() -> None:
        try:
            seen.append("begun")
            await go.wait()
            seen.append("gone on")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task, begun = await in_a_callback(lambda: (tasks.start(waits()), list(seen)))
    assert begun == ["begun"]
    go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await tasks.close(1)

    assert task.cancelled()
    assert seen == ["begun", "gone on", "cancelled"]


async def test_a_task_that_is_started_by_a_task_begins_at_the_next_turn() -> None:
    tasks = RequestTasks()
    seen: list[str] = []

    async def quick() -> None:
        seen.append("ran")

    task = tasks.start(quick())
    assert seen == []
    assert task is not None
    await task
    assert seen == ["ran"]


async def test_a_task_that_dies_is_reported() -> None:
    tasks = RequestTasks()

    async def dies() -> None:
        raise ValueError("bug")

    with capture_logs() as logs:
        await in_a_callback(lambda: tasks.start(dies()))

    assert [line["event"] for line in logs] == ["task_failed"]
