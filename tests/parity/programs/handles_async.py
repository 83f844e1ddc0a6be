import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.exceptions import RequestCancelledError


@serve.deployment
class Doubler:
    def double(self, val: int) -> int:
        return 2 * val


@serve.deployment
class Sleeper:
    def __init__(self):
        self.cancelled = 0

    async def sleep(self, s):
        try:
            await asyncio.sleep(s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return s

    async def count(self):
        return self.cancelled


@serve.deployment
class Driver:
    def __init__(self, d: DeploymentHandle, s: DeploymentHandle):
        self._d, self._s = d, s

    async def gather(self, n):
        return await asyncio.gather(*[self._d.double.remote(i) for i in range(n)])

    async def chain(self, x):
        return await self._d.double.remote(self._d.double.remote(self._d.double.remote(x)))

    async def kw(self, x):
        return await self._d.double.remote(val=self._d.double.remote(x))

    async def cancel(self):
        r = self._s.sleep.remote(60)
        await asyncio.sleep(0.2)
        r.cancel()
        try:
            await r
        except (RequestCancelledError, asyncio.CancelledError) as e:
            name = type(e).__name__
        for _ in range(50):
            if await self._s.count.remote():
                break
            await asyncio.sleep(0.1)
        return name, await self._s.count.remote()

    async def wait_for(self):
        try:
            await asyncio.wait_for(self._s.sleep.remote(60), 0.2)
        except asyncio.TimeoutError:
            return "timeout"

    async def tasks(self):
        tasks = [asyncio.ensure_future(self._wait(x)) for x in (0.3, 0.0)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = [t.result() for t in done]
        await asyncio.wait(pending)
        return first

    async def _wait(self, x):
        return await self._s.sleep.remote(x)

    async def blocking(self):
        try:
            self._d.double.remote(1).result()
        except RuntimeError as e:
            return "RuntimeError"


h = serve.run(Driver.bind(Doubler.bind(), Sleeper.bind()))
for name in ["cancel", "wait_for", "tasks", "blocking"]:
    print(name, getattr(h, name).remote().result())
print(h.gather.remote(4).result(), h.chain.remote(1).result(), h.kw.remote(2).result())


async def main():
    return await h.gather.remote(2), await asyncio.gather(h.chain.remote(1), h.chain.remote(2))


print(asyncio.run(main()))
