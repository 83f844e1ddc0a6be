import time, asyncio
from ray import serve


@serve.deployment(
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.2,
        "downscale_delay_s": 0.5,
        "metrics_interval_s": 0.1,
        "look_back_period_s": 0.5,
    },
    ray_actor_options={"num_cpus": 0.1},
    max_ongoing_requests=10,
)
class A:
    async def __call__(self):
        await asyncio.sleep(6)
        return 1


h = serve.run(A.bind(), route_prefix=None)
rs = [h.remote() for _ in range(9)]
seen = 0
t = time.time()
while time.time() - t < 20 and seen < 3:
    seen = max(seen, serve.status().applications["default"].deployments["A"].replica_states.get("RUNNING", 0))
    time.sleep(0.2)
print(seen)
print(sum(r.result() for r in rs))
t = time.time()
while time.time() - t < 40:
    n = serve.status().applications["default"].deployments["A"].replica_states.get("RUNNING", 0)
    if n == 1:
        break
    time.sleep(0.2)
print(n)
