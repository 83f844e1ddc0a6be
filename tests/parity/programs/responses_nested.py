from ray import serve


@serve.deployment
class A:
    def __call__(self, x):
        return x + 1


@serve.deployment
class Sum:
    def __call__(self, *xs, **kw):
        return sum(xs) + sum(kw.values())


@serve.deployment
class Root:
    def __init__(self, a, s, d):
        self.a, self.s, self.d = a, s, d

    async def __call__(self, n):
        rs = [self.a.remote(i) for i in range(n)]
        return await self.s.remote(*rs, k=self.a.remote(100)), sorted(self.d), [await self.d["x"].remote(1)]


a = A.bind()
h = serve.run(Root.bind(a, Sum.bind(), {"x": a, "l": [A.options(name="B").bind()]}))
print(h.remote(3).result())
print(sorted(serve.status().applications["default"].deployments))
