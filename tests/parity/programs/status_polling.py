import time
import requests
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.serve.config import AutoscalingConfig


@serve.deployment(num_replicas=2)
class A:
    def __call__(self, request):
        return "a"


@serve.deployment
class B:
    def __init__(self, a):
        self.a = a

    async def __call__(self, request):
        return await self.a.remote(None)


serve.run(B.bind(A.bind()), name="app1", route_prefix="/app1", blocking=False)
serve._run(A.bind(), name="app2", route_prefix="/app2", _blocking=False) if False else serve.run(
    A.bind(), name="app2", route_prefix="/app2"
)
start = time.time()
while time.time() - start < 30:
    if serve.status().applications["app2"].status == ApplicationStatus.RUNNING:
        break
    time.sleep(0.1)
status = serve.status()
for name, app in sorted(status.applications.items()):
    print(name, app.status, app.status == "RUNNING", app.message, isinstance(app.last_deployed_time_s, float))
    for dname, d in sorted(app.deployments.items()):
        print(" ", dname, d.status, d.status_trigger, d.replica_states, repr(d.message))
print(status.target_capacity)
print(
    all(str(v) == "HEALTHY" or v.value == "HEALTHY" for v in status.proxies.values()),
    len(status.proxies) >= 1,
)
serve.delete("app1")
print(sorted(serve.status().applications))
serve.shutdown()
print(serve.status().applications)
