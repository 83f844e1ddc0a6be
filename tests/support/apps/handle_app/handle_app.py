"""Deployments for the tests of handles."""

from __future__ import annotations

import asyncio
import threading
import time

import muster as serve
from muster.handles import get_deployment_handle
from serve_common.runtime.request_context import request_context


class Refused(Exception):
    """Has what its own making needs, so that pickle alone cannot bring it back."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} was refused with {code}")


class Known(ValueError):
    """Can be pickled."""


class Leaf:
    """What a chain ends with."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.cancelled = 0
        self.started = 0

    async def __call__(self, value=None):
        return value

    def plain(self, value, *, times=1):
        return value * times

    async def greet(self, name, greeting="hello"):
        return f"{greeting} {name}"

    async def size(self, data):
        return len(data)

    async def make(self, size):
        return bytes(size)

    async def nothing_to_pickle(self):
        return threading.Lock()

    async def known(self):
        raise Known("no such digit")

    async def refused(self):
        raise Refused("digit", 7)

    async def leave(self):
        raise SystemExit(3)

    async def hold(self):
        self.started += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def counts(self):
        return self.started, self.cancelled

    async def numbers(self, count):
        for number in range(count):
            yield number

    def plain_numbers(self, count):
        yield from range(count)

    async def number(self):
        return 1

    def plain_number(self):
        return 1

    async def broken_numbers(self):
        yield 1
        raise Known("after one")

    async def endless(self):
        self.started += 1
        try:
            while True:
                yield bytes(10_000)
                await asyncio.sleep(0)
        finally:
            self.cancelled += 1

    async def seen(self):
        context = request_context.get()
        return context.request_id, context.deadline - time.monotonic(), context.model_id

    async def who(self):
        return self.tag


class Middle:
    """Calls the leaf for everything."""

    def __init__(self) -> None:
        self.leaf = get_deployment_handle("leaf")

    async def __call__(self, value):
        return [await self.leaf.remote(value)]

    def plain(self, value):
        return self.leaf.plain.remote(value, times=2).result(timeout_s=30)

    async def blocked(self):
        return self.leaf.remote(1).result()

    async def hold(self):
        return await self.leaf.hold.remote()

    async def impatient(self):
        return await self.leaf.options(timeout_s=0.1).hold.remote()

    def hold_plain(self):
        return self.leaf.hold.remote().result()

    async def hold_unawaited(self):
        self.leaf.hold.remote()
        await asyncio.sleep(60)

    async def known(self):
        return await self.leaf.known.remote()

    async def seen(self):
        return request_context.get().request_id, await self.leaf.seen.remote()

    async def numbers(self, count):
        async for number in self.leaf.options(stream=True).numbers.remote(count):
            yield number * 10

    async def composed(self, name):
        return await self.leaf.greet.remote(self.leaf.greet.remote(name), greeting="oh,")

    async def everyone(self):
        return await get_deployment_handle("rolled").broadcast("who").results_async()

    async def who(self):
        rolled = get_deployment_handle("rolled")
        return [await rolled.who.remote() for _ in range(8)]


async def application(scope, receive, send):
    """Serves nothing over HTTP."""


@serve.ingress(application)
class Ingress:
    """An ASGI application whose methods are called by handles."""

    async def number(self, number):
        return number

    async def numbers(self, count):
        for number in range(count):
            yield number

    def plain_numbers(self, count):
        yield from range(count)
