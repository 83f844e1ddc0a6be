import asyncio
import time

from ray import serve
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)

for cls in (BackPressureError, DeploymentUnavailableError, RequestCancelledError):
    print(cls.__name__, issubclass(cls, RayServeException))


class Broken(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


@serve.deployment(max_ongoing_requests=1, max_queued_requests=1, ray_actor_options={"num_cpus": 0})
class Slow:
    async def __call__(self, s=0.0):
        await asyncio.sleep(s)
        return "done"


@serve.deployment(max_ongoing_requests=10, ray_actor_options={"num_cpus": 0})
class Main:
    def __init__(self, slow):
        self.slow = slow

    async def sleep(self, s):
        await asyncio.sleep(s)
        return s

    def value_error(self):
        raise ValueError("bad value")

    def broken(self):
        raise Broken(7, "seven")

    def key(self):
        return {}["missing"]

    async def burst(self):
        calls = [self.slow.remote(1.0) for _ in range(6)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, BackPressureError)]
        return len(results), len(refused) > 0, type(refused[0]).__name__, isinstance(refused[0].message, str)

    async def __call__(self):
        return "main"


h = serve.run(Main.bind(Slow.bind()))
for method, kind in (("value_error", ValueError), ("broken", Broken), ("key", KeyError)):
    try:
        getattr(h, method).remote().result()
    except kind as e:
        print(method, isinstance(e, kind), "bad value" in str(e), getattr(e, "code", None))
print(h.burst.remote().result())
r = h.sleep.remote(60)
time.sleep(0.3)
r.cancel()
try:
    r.result()
except RequestCancelledError as e:
    print(type(e).__name__, isinstance(e, RayServeException), r.cancelled())
try:
    h.sleep.remote(5).result(timeout_s=0.1)
except TimeoutError as e:
    print("TimeoutError")
for call in (
    lambda: serve.get_app_handle("unknown"),
    lambda: serve.get_deployment_handle("Unknown", "default").remote().result(timeout_s=5),
):
    try:
        call()
    except Exception as e:
        print(isinstance(e, (RayServeException, KeyError)))
try:
    serve.get_replica_context()
except RayServeException as e:
    print("outside of a replica", type(e).__mro__[-3] is Exception)
try:
    h.remote([h.sleep.remote(0)]).result()
    print("nested response accepted")
except Exception as e:
    print("nested", isinstance(e, RuntimeError))


async def main():
    try:
        h.remote().result()
    except RuntimeError as e:
        print("RuntimeError")
    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.2)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("CancelledError")


async def wait():
    return await h.sleep.remote(60)


asyncio.run(main())
