import requests
from ray import serve
from ray.serve import RunTarget


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class A:
    def __init__(self, x):
        self.x = x

    def __call__(self, request=None):
        return self.x


hs = serve.run_many(
    [
        RunTarget(A.bind("one"), name="one", route_prefix="/one"),
        RunTarget(A.bind("two"), name="two", route_prefix="/two"),
        RunTarget(A.bind("none"), name="none", route_prefix=None),
    ]
)
print([h.remote().result() for h in hs])
for p in ["/one", "/two", "/none", "/one/x", "/"]:
    r = requests.get("http://127.0.0.1:8000" + p)
    print(p, r.status_code, r.text if r.ok else "")
serve.delete("one")
r = requests.get("http://127.0.0.1:8000/one")
print(r.status_code)
print(sorted((n, a.status.value) for n, a in serve.status().applications.items()))
serve.run(A.bind("new"), name="two", route_prefix="/moved")
print(requests.get("http://127.0.0.1:8000/two").status_code, requests.get("http://127.0.0.1:8000/moved").text)
serve.delete("nonexistent")
serve.shutdown()
print(serve.status().applications)
serve.shutdown()
