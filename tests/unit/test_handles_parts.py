"""The parts of handles between threads: items cut anywhere, wakers that are never lost."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.handles import calls as items_module
from muster.handles.calls import ItemReader
from muster.handles.wakeups import Wakers, make_waiter, wait_in_thread
from serve_common.dispatch.errors import ResponseUnusable
from serve_common.runtime.threads import Mailbox


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
