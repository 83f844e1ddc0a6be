from ray import serve
from ray.serve.exceptions import RayServeException


class MyErr(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.a, self.b = a, b


@serve.deployment
class D:
    def __call__(self):
        raise MyErr(1, "two")

    async def aio(self):
        raise MyErr(3, "x")

    def gen(self):
        yield 1
        raise MyErr(5, "g")


h = serve.run(D.bind())
for m in ("__call__", "aio"):
    try:
        h.options(method_name=m).remote().result()
    except MyErr as e:
        print("MyErr", e.a, e.b)
    except Exception as e:
        print(type(e).__name__, isinstance(e, RayServeException))
g = h.options(stream=True).gen.remote()
print(next(g))
try:
    next(g)
except MyErr as e:
    print("MyErr", e.a)
except Exception as e:
    print(type(e).__name__)
