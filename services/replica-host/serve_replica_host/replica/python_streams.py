"""The items of a generator on their way to a handle: each encoded and put after its length, so that they can be joined.

Why lengths and not frames: a token is a few bytes, and a frame for each would cost more than all the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, Final

from serve_replica_host.replica.answer_stream import AnswerStream
from serve_replica_host.replica.contexts import answer_begun
from serve_replica_host.replica.exchange import Exchange, ToBus
from serve_replica_host.replica.user_code import UserCode

LENGTH_BYTES: Final = 4
_CHARSET: Final = "utf-8"  # asked for by the writer, which here gets bytes only

Encode = Callable[[Any], bytes]


async def send_items(
    code: UserCode, result: Any, exchange: Exchange, to_bus: Callable[[ToBus], object], encode: Encode
) -> ToBus:
    """Send all items of a generator, async or plain; returned is what ends the exchange.

    A plain one may block, so it runs in a thread. Raises what the generator or ``encode`` raises, TypeError for what is
    no generator.
    """
    is_async = inspect.isasyncgen(result)
    if not is_async and not inspect.isgenerator(result):
        raise TypeError(
            f"a stream was asked for, but a {type(result).__name__} was returned and no generator"
        )
    stream = AnswerStream(exchange, to_bus)
    # Its head leaves with the first item: until then a failure is the whole answer, and the deadline holds.
    stream.open(200, [], soon=False)
    if is_async:
        items = _items(result, encode)
        try:
            await stream.run(items, _CHARSET)
        finally:
            await items.aclose()
    else:
        await code.run_plain(stream.run_plain, _plain_items(result, encode), _CHARSET)
    stream.end()
    return stream.outcome()


async def _items(generator: AsyncGenerator[Any, None], encode: Encode) -> AsyncGenerator[bytes, None]:
    has_begun = False
    try:
        async for item in generator:
            data = encode(item)
            yield len(data).to_bytes(LENGTH_BYTES, "big") + data
            if not has_begun:
                has_begun = True
                answer_begun()  # what the generator calls from here on has no deadline
    finally:
        await generator.aclose()


def _plain_items(generator: Generator[Any, None, None], encode: Encode) -> Iterator[bytes]:
    has_begun = False
    try:
        for item in generator:
            data = encode(item)
            yield len(data).to_bytes(LENGTH_BYTES, "big") + data
            if not has_begun:
                has_begun = True
                answer_begun()
    finally:
        generator.close()
