from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse


@serve.deployment
class Inner:
    def __init__(self, n):
        self.n = n

    async def __call__(self, x):
        return x * self.n

    def stream(self, n):
        yield from range(n)

    def fail(self):
        raise ValueError("inner")


@serve.deployment
class Outer:
    def __init__(self, inner: DeploymentHandle):
        self.inner = inner

    async def __call__(self, x):
        return await self.inner.remote(x) + 1

    async def caught(self):
        try:
            await self.inner.fail.remote()
        except ValueError as e:
            return "caught"


h = serve.run(Outer.bind(Inner.bind(3)), _local_testing_mode=True)
print(h.remote(2).result())
print(h.caught.remote().result())
i = serve.run(Inner.bind(2), name="i", _local_testing_mode=True)
print(list(i.options(stream=True).stream.remote(3)))
try:
    i.fail.remote().result()
except ValueError as e:
    print("ValueError", e)
