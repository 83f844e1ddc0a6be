"""What passes between a replica's threads, and how an answer's body leaves."""

from __future__ import annotations

import asyncio
import threading

from hypothesis import given
from hypothesis import strategies as st

from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, WINDOW_FRAMES
from serve_common.runtime.threads import LoopThread, Mailbox
from serve_replica_host.replica.io.flow import OutgoingBody


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
    async with asyncio.timeout(30):
        while len(taken) < count:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)


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


@given(
    pieces=st.lists(st.integers(0, 3 * FRAME_BODY_BYTES_MAX), min_size=1, max_size=4),
    allowances=st.lists(st.integers(1, 3), max_size=12),
)
def test_a_body_leaves_whole_in_order_and_never_more_than_allowed(
    pieces: list[int], allowances: list[int]
) -> None:
    body = OutgoingBody()
    allowed, sent, lasts = WINDOW_FRAMES - 1, [], []

    def pump() -> None:
        while (frame := body.next_frame()) is not None:
            sequence, last, data = frame
            assert sequence == len(sent) + 1
            assert len(data) <= FRAME_BODY_BYTES_MAX
            sent.append(data)
            lasts.append(last)
            assert len(sent) <= allowed

    content = [bytes([at]) * size for at, size in enumerate(pieces)]
    for at, piece in enumerate(content):
        body.add(piece, last=at == len(content) - 1)
        pump()
    for frames in [*allowances, *([4] * 8)]:
        allowed += frames
        body.allow(frames)
        pump()

    assert b"".join(sent) == b"".join(content)
    assert lasts == [False] * (len(lasts) - 1) + [True]
    assert body.unsent_bytes == 0


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
