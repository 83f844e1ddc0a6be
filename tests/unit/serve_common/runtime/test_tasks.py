"""Tasks and their owners, mailboxes between threads, and loops in threads of their own."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
from structlog.testing import capture_logs

from serve_common.runtime.tasks import TaskOwner
from serve_common.runtime.threads import LoopThread, Mailbox
from tests.support.waiting import eventually


async def _forever() -> None:
    await asyncio.Event().wait()


async def test_a_task_that_fails_is_logged_and_its_owner_is_told() -> None:
    told: asyncio.Future[tuple[str, BaseException]] = asyncio.get_running_loop().create_future()
    owner = TaskOwner("loops", on_failure=lambda name, failure: told.set_result((name, failure)))

    async def fails() -> None:
        raise ValueError("no such replica")

    with capture_logs() as logs:
        owner.start(fails(), "reconcile")
        name, failure = await told
    assert name == "loops.reconcile"
    assert str(failure) == "no such replica"
    assert [(line["event"], line["task"], line["exc_info"]) for line in logs] == [
        ("task_failed", "loops.reconcile", failure)
    ]
    assert len(owner) == 0


async def test_a_failed_task_leaves_the_other_tasks_of_its_owner_alone() -> None:
    failed = asyncio.Event()
    owner = TaskOwner("loops", on_failure=lambda _name, _failure: failed.set())

    async def fails() -> None:
        raise ValueError

    with capture_logs():
        other = owner.start(_forever(), "other")
        owner.start(fails(), "fails")
        await failed.wait()
    assert not other.is_done
    await owner.close(1)


async def test_a_task_is_kept_alive_without_another_reference() -> None:
    owner = TaskOwner("loops")
    ended = asyncio.Event()
    wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    weak_wake = weakref.ref(wake)

    async def waits(future: asyncio.Future[None]) -> None:
        await future
        ended.set()

    owner.start(waits(wake), "waits")
    del wake
    await asyncio.sleep(0)
    gc.collect()
    held = weak_wake()
    assert held is not None
    held.set_result(None)
    await ended.wait()


async def test_close_cancels_every_task_and_waits_for_its_clean_up() -> None:
    owner = TaskOwner("loops")
    started = asyncio.Event()
    steps: list[str] = []

    async def cleans_up() -> None:
        try:
            started.set()
            await _forever()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    task = owner.start(cleans_up(), "cleans_up")
    await started.wait()
    with capture_logs() as logs:
        await owner.close(1)
    assert steps == ["cleaned"]
    assert task.is_done
    assert logs == []


async def test_a_single_task_can_be_cancelled_without_being_reported_as_failed() -> None:
    owner = TaskOwner("loops")
    started, ended = asyncio.Event(), asyncio.Event()

    async def marks_its_end() -> None:
        try:
            started.set()
            await _forever()
        finally:
            ended.set()

    with capture_logs() as logs:
        task = owner.start(marks_its_end(), "marks_its_end")
        await started.wait()
        task.cancel()
        await ended.wait()
        await owner.close(1)
    assert task.is_done
    assert logs == []


async def test_close_names_the_tasks_that_outlive_its_timeout() -> None:
    owner = TaskOwner("loops")
    release, started, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    task = owner.start(stubborn(), "stubborn")
    await started.wait()
    with capture_logs() as logs:
        await owner.close(0.01)
    assert [(line["event"], line["tasks"]) for line in logs] == [("tasks_did_not_stop", ["loops.stubborn"])]
    assert not task.is_done
    release.set()
    await ended.wait()


async def test_close_from_an_own_task_does_not_cancel_that_task() -> None:
    owner = TaskOwner("loops")
    closed = asyncio.Event()

    async def closes() -> None:
        await owner.close(1)
        closed.set()

    other = owner.start(_forever(), "other")
    owner.start(closes(), "closes")
    await closed.wait()
    assert other.is_done


async def test_nothing_can_be_started_after_close() -> None:
    owner = TaskOwner("loops")
    await owner.close(1)
    with pytest.raises(RuntimeError, match="task owner 'loops' is closed; it cannot start 'late'"):
        owner.start(_forever(), "late")


# What passes between a replica's threads, and how an answer's body leaves.


def test_values_of_many_threads_all_arrive_and_each_threads_in_order() -> None:
    thread = LoopThread("test")
    taken: list[tuple[int, int]] = []
    done = threading.Event()

    def take(value: tuple[int, int]) -> None:
        taken.append(value)
        if len(taken) == 4000:
            done.set()

    mailbox: Mailbox[tuple[int, int]] = Mailbox(thread.loop, take)
    writers = [
        threading.Thread(target=lambda n=n: [mailbox.put((n, at)) for at in range(1000)]) for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert done.wait(30)
    for number in range(4):
        assert [at for n, at in taken if n == number] == list(range(1000))
    thread.stop(30)


async def until_taken(taken: list[int], count: int) -> None:
    await eventually(lambda: len(taken) >= count)


async def test_a_burst_costs_one_wake_up() -> None:
    loop = asyncio.get_running_loop()
    wakes: list[int] = []
    taken: list[int] = []
    mailbox: Mailbox[int] = Mailbox(loop, taken.append)
    real = mailbox._wake
    mailbox._wake = lambda: (wakes.append(1), real())[1]  # type: ignore[method-assign, func-returns-value]
    for value in range(100):
        mailbox.put(value)
    await until_taken(taken, 100)
    await asyncio.sleep(0.01)

    assert taken == list(range(100))
    assert len(wakes) == 1


async def test_values_that_come_without_end_leave_others_their_turn() -> None:
    loop = asyncio.get_running_loop()
    taken = 0

    def take(value: int) -> None:
        nonlocal taken
        taken += 1
        mailbox.put(value)

    mailbox: Mailbox[int] = Mailbox(loop, take)
    mailbox.put(1)
    for _ in range(5):
        await asyncio.sleep(0)

    assert 1 <= taken <= 6
    mailbox._values.clear()


def test_a_mailbox_of_a_closed_loop_drops_what_comes() -> None:
    thread = LoopThread("test")
    thread.stop(30)

    Mailbox(thread.loop, lambda value: None).put(1)


def test_a_loop_thread_runs_work_and_stops() -> None:
    thread = LoopThread("test")

    async def name() -> str:
        return threading.current_thread().name

    assert thread.submit(name()).result(30) == "test"
    thread.stop(30)
    assert thread.loop.is_closed()


async def test_what_is_gathered_comes_with_one_wake_up_when_it_is_said() -> None:
    taken: list[int] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), taken.append)
    mailbox.gather()
    assert mailbox.put(1)
    assert mailbox.put(2)
    await asyncio.sleep(0.01)
    assert taken == []
    mailbox.wake()
    mailbox.wake()
    await until_taken(taken, 2)
    assert taken == [1, 2]
    mailbox.put(3)
    await until_taken(taken, 3)
    assert taken == [1, 2, 3]


async def test_what_is_put_quietly_comes_with_the_next_value_or_when_the_loop_looks() -> None:
    taken: list[int] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), taken.append)
    mailbox.put_quietly(1)
    await asyncio.sleep(0.01)
    assert taken == []
    assert len(mailbox) == 1
    mailbox.empty()
    assert taken == [1]
    mailbox.put_quietly(2)
    mailbox.put(3)
    await until_taken(taken, 3)
    assert taken == [1, 2, 3]


def test_what_is_put_for_a_closed_loop_is_not_taken_and_the_giver_knows() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop, lambda _: None)
    loop.close()
    assert not mailbox.put(1)
    mailbox.wake()
