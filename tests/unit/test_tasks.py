from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from structlog.testing import capture_logs

from serve_common.runtime.tasks import TaskOwner


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
