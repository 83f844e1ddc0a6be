from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Pre:
    def process(self, t):
        return t.strip().lower()

    def stream(self, n):
        for i in range(n):
            yield i


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Main:
    def __init__(self, pre: DeploymentHandle):
        self.pre = pre
        self.st = pre.options(stream=True)

    async def __call__(self, t):
        return await self.pre.process.remote(t)

    async def total(self, n):
        s = 0
        async for x in self.st.stream.remote(n):
            s += x
        return s

    async def relay(self, n):
        async for x in self.st.stream.remote(n):
            yield x * 2

    async def err(self):
        try:
            await self.pre.nope.remote()
        except RayServeException as e:
            return "RayServeException"

    async def dyn(self):
        h = serve.get_deployment_handle("Pre")
        h2 = serve.get_app_handle("default")
        return await h.process.remote(" Q "), h.app_name, await h2.remote(" Z ")


h = serve.run(Main.bind(Pre.bind()))
print(
    h.remote("  ABC ").result(),
    h.total.remote(5).result(),
    list(h.options(stream=True).relay.remote(3)),
    h.err.remote().result(),
    h.dyn.remote().result(),
)
