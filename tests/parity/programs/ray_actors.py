import asyncio

import ray
from ray import serve


@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def add(self, n):
        self.count += n
        return self.count


@serve.deployment
class Counting:
    def __init__(self, counter):
        self.counter = counter

    async def add(self, n):
        return await self.counter.add.remote(n)

    def add_blocking(self, n):
        return ray.get(self.counter.add.remote(n))

    async def wait(self):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ray.get(ended.add.remote(1))
            raise


ended = Counter.remote()
counter = Counter.remote()
handle = serve.run(Counting.bind(counter), name="counting", route_prefix="/counting")
print(handle.add.remote(2).result(), handle.add_blocking.remote(3).result())
print(ray.get(counter.add.remote(0)))
waiting = handle.wait.remote()
print(handle.add.remote(0).result())
waiting.cancel()
for _ in range(100):
    if ray.get(ended.add.remote(0)):
        break
    asyncio.run(asyncio.sleep(0.1))
print("ended", ray.get(ended.add.remote(0)))
