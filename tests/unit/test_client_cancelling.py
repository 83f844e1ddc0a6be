"""That a caller who is told to stop stops, though the answer came in the same moment."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from muster.client.address import StackAddress
from muster.client.nats import NatsRequests


class WaitingClient:
    """Waits for an answer as nats-py does."""

    is_connected = True

    def __init__(self) -> None:
        self.answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def request(self, subject: str, body: bytes, *, timeout: float, headers: object) -> Msg:
        return await asyncio.wait_for(self.answer, timeout)


def requests_over(client: WaitingClient) -> NatsRequests:
    requests = NatsRequests(StackAddress(urls=("nats://127.0.0.1:1",)))
    requests._client = cast(Client, client)
    return requests


async def test_who_is_cancelled_as_the_answer_comes_is_cancelled() -> None:
    client = WaitingClient()
    asking = asyncio.get_running_loop().create_task(requests_over(client).request("s", b"", timeout_s=5.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.answer.set_result(Msg(cast(Client, client), "s", "", b"x"))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_who_was_cancelled_earlier_and_cleans_up_is_answered() -> None:
    client = WaitingClient()
    requests = requests_over(client)

    async def clean_up() -> bytes:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            answer = await requests.request("s", b"", timeout_s=5.0)
            return answer.body
        raise AssertionError

    cleaning = asyncio.get_running_loop().create_task(clean_up())
    await asyncio.sleep(0)
    cleaning.cancel()
    await asyncio.sleep(0)
    client.answer.set_result(Msg(cast(Client, client), "s", "", b"gone"))
    assert await cleaning == b"gone"
