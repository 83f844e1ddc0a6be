import asyncio

import ray
from ray import serve


@ray.remote
def square(x):
    return x * x


@serve.deployment
class Parallel:
    async def __call__(self, values):
        return await asyncio.gather(*[square.remote(value) for value in values])


@serve.deployment
def type_of(value, other=None):
    return type(value).__name__, value, other


ray.init(ignore_reinit_error=True)
handle = serve.run(Parallel.bind(), name="parallel", route_prefix="/parallel")
print(handle.remote([1, 2, 3]).result())
handle = serve.run(type_of.bind(), name="type", route_prefix="/type")
print(handle.remote(ray.put({"a": 1})).result())
print(handle.remote(square.remote(5), other=square.remote(6)).result())


@ray.remote
def fails():
    raise ValueError("of the task")


try:
    handle.remote(fails.remote()).result()
except ValueError as error:
    print("ValueError", "of the task" in str(error))
