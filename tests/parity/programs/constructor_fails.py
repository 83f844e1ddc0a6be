import requests, time
from ray import serve
from ray.serve.exceptions import RayServeException


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Good:
    def __call__(self, request=None):
        return "good"


@serve.deployment(name="Good", ray_actor_options={"num_cpus": 0.1})
class Bad:
    def __init__(self):
        raise RuntimeError("cannot load weights")

    def __call__(self, request):
        return "bad"


serve.run(Good.bind(), name="g", route_prefix="/g")
t = time.time()
try:
    serve.run(Bad.bind(), name="b", route_prefix="/b")
except RuntimeError as e:
    print("RuntimeError")
except Exception as e:
    print(type(e), "cannot load weights" in str(e))
print(time.time() - t < 60)
print(
    serve.status().applications["b"].status,
    "cannot load weights" in str(serve.status().applications["b"].deployments["Good"].message),
)
print(requests.get("http://127.0.0.1:8000/g").text)
serve.delete("b")
print(sorted(serve.status().applications))
try:
    serve.run(Good.bind(), name="other", route_prefix="/g")
except Exception as e:
    print(isinstance(e, RayServeException))
