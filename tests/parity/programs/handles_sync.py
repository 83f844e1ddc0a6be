import concurrent.futures
import time

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse


@serve.deployment(max_ongoing_requests=20)
class Model:
    def __call__(self, x=0, *, y=0):
        return x + y

    def slow(self, s):
        time.sleep(s)
        return "slept"

    async def kwargs(self, *args, **kwargs):
        return [list(args), kwargs]

    def fail(self):
        raise KeyError("missing thing")


handle: DeploymentHandle = serve.run(Model.bind())
r: DeploymentResponse = handle.remote(1, y=2)
print(type(r).__name__, r.result(), r.result())
print(handle.kwargs.remote(1, "a", b=[2]).result())
print(handle.options(method_name="kwargs").remote().result())
try:
    handle.slow.remote(5).result(timeout_s=0.2)
except TimeoutError as e:
    print("timeout")
try:
    handle.fail.remote().result()
except KeyError as e:
    print("KeyError", "missing thing" in str(e))
try:
    handle.nothing.remote().result()
except Exception as e:
    print(type(e).__mro__[0].__name__ if False else "no such method", isinstance(e, AttributeError))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(list(pool.map(lambda i: handle.remote(i).result(), range(6))))
same = serve.get_app_handle("default")
print(same.remote(4).result(), handle.deployment_name, handle.app_name)
print(handle.deployment_id)
print(serve.get_deployment_handle("Model", app_name="default").remote(5).result())
