import os
import requests
from ray import serve

base = "http://127.0.0.1:8000"


@serve.deployment
class V:
    def __init__(self, v):
        self.v = v

    def __call__(self, request):
        return self.v


serve.run(V.bind("one"))
print(requests.get(base).text)
serve.run(V.bind("two"))
print(requests.get(base).text)
serve.run(V.options(num_replicas=2).bind("two"))
print(
    len(serve.status().applications["default"].deployments["V"].replica_states),
    serve.status().applications["default"].deployments["V"].replica_states,
)
serve.run(V.bind("moved"), route_prefix="/moved")
print(requests.get(base + "/moved").text, requests.get(base + "/").status_code)


@serve.deployment(max_constructor_retry_count=1)
class Broken:
    def __init__(self):
        raise RuntimeError("cannot start today")

    def __call__(self, request):
        return 1


try:
    serve.run(Broken.bind(), name="broken", route_prefix="/broken")
except RuntimeError as e:
    print("failed", "broken" in str(e))
print(serve.status().applications["broken"].status)
print("cannot start today" in str(serve.status().applications["broken"]))
serve.delete("broken")
serve.delete("broken")
serve.delete("never there")
print(sorted(serve.status().applications))
try:
    serve.run(V.bind("x"), name="clash", route_prefix="/moved")
except Exception as e:
    print(type(e).__name__, "/moved" in str(e))
print(sorted(serve.status().applications))
