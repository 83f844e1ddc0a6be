from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    def __init__(self, other=None):
        self.other = other

    def __call__(self, x=1):
        return x

    def gen(self, n):
        yield from range(n)

    async def of_handle(self):
        h = self.other
        return type(h).__name__, h.deployment_name, h.app_name, await h.remote(4)


@serve.deployment(name="Second", ray_actor_options={"num_cpus": 0})
def second(x):
    return x * 10


h = serve.run(Model.bind(second.bind()), name="shop", route_prefix="/shop")
print(repr(h), h.deployment_name, h.app_name, isinstance(h, DeploymentHandle))
print(h.of_handle.remote().result())
same = serve.get_app_handle("shop")
print(
    same.deployment_name,
    same == serve.get_app_handle("shop"),
    same == serve.get_deployment_handle("Second", "shop"),
)
print(h.options(method_name="gen", stream=True) == h, h.options(stream=True).deployment_name)
print(h.deployment_id.name, h.deployment_id.app_name)
r = h.remote(3)
print(
    type(r) is DeploymentResponse,
    r.result(),
    r.result(timeout_s=1),
    r.cancelled(),
    type(r.request_id).__name__,
)
g = h.options(stream=True).gen.remote(3)
print(type(g) is DeploymentResponseGenerator, next(g), list(g))
for bad in (dict(nope=1), dict(method_name=3)):
    try:
        h.options(**bad).remote().result()
    except Exception as e:
        print(
            sorted(bad),
            type(e).__name__ in ("TypeError", "AttributeError", "RayServeException", "BadField")
            or isinstance(e, Exception),
        )
print(h.remote(h.remote(h.remote(2))).result())
print(serve.get_deployment_handle("Second", app_name="shop").remote(2).result())
