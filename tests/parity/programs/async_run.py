import asyncio
from ray import serve


@serve.deployment
class A:
    async def __call__(self, x=0):
        return x + 1


async def main():
    h = serve.run(A.bind(), route_prefix=None)
    print(await h.remote(1))
    print(serve.status().applications["default"].status)
    await serve.shutdown_async()


asyncio.run(main())
