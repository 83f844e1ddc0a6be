import asyncio

from ray import serve
from ray.serve.exceptions import RayServeException

for kwargs in [
    dict(max_batch_size=0),
    dict(max_batch_size="x"),
    dict(max_batch_size=1.5),
    dict(max_batch_size=2.0),
    dict(batch_wait_timeout_s=-1),
    dict(batch_wait_timeout_s="x"),
    dict(max_concurrent_batches="a"),
    dict(batch_size_fn=3),
    dict(),
]:
    try:

        @serve.batch(**kwargs)
        async def f(xs):
            return xs

        print(kwargs, "ok")
    except Exception as e:
        print(kwargs, type(e).__name__, e)
try:

    @serve.batch
    def g(xs):
        return xs
except Exception as e:
    print(type(e).__name__, e)
try:
    serve.batch(3)
except Exception as e:
    print(type(e).__name__, e)
for kwargs in [
    dict(max_num_models_per_replica=0),
    dict(max_num_models_per_replica=-1),
    dict(max_num_models_per_replica="x"),
    dict(max_num_models_per_replica=-2),
]:
    try:

        @serve.multiplexed(**kwargs)
        async def load(model_id):
            return model_id

        print(kwargs, "ok")
    except Exception as e:
        print(kwargs, type(e).__name__)
for wrong in (3, lambda: 1):
    try:
        serve.multiplexed(wrong)
        print("ok")
    except Exception as e:
        print("multiplexed", type(e).__name__)


@serve.deployment(max_ongoing_requests=20, ray_actor_options={"num_cpus": 0})
class Batched:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.05)
    async def double(self, xs):
        return [2 * x for x in xs]

    @serve.batch(max_batch_size=5, batch_wait_timeout_s=0.05)
    async def fails(self, xs):
        raise ValueError("no")

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.05)
    async def short(self, xs):
        return [1] * (len(xs) + 1)

    @serve.batch(max_batch_size=10, batch_wait_timeout_s=0.5, batch_size_fn=lambda items: sum(items))
    async def sized(self, xs):
        return [len(xs)] * len(xs)

    async def __call__(self, method, *items):
        results = await asyncio.gather(*[getattr(self, method)(i) for i in items], return_exceptions=True)
        return [
            (isinstance(r, RayServeException), isinstance(r, ValueError), str(r))
            if isinstance(r, Exception)
            else r
            for r in results
        ]

    def setters(self):
        self.double.set_max_batch_size(7)
        self.double.set_batch_wait_timeout_s(0.5)
        return self.double._get_max_batch_size(), self.double._get_batch_wait_timeout_s()


h = serve.run(Batched.bind())
print(h.remote("double", 1, 2, 3, 4, 5).result())
print(h.remote("fails", 1, 2).result())
print(h.remote("short", 1, 2).result())
print(h.remote("sized", 4, 4, 4, 1).result())
print(h.setters.remote().result())
