from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=7,
    max_queued_requests=9,
    user_config={"a": 1},
    ray_actor_options={"num_cpus": 0.1},
    graceful_shutdown_timeout_s=3,
    health_check_period_s=4,
    health_check_timeout_s=5,
)
class D:
    """The docstring."""

    def __init__(self, x=1):
        self.x = x

    def __call__(self):
        return self.x


@serve.deployment
def plain(x):
    return x


print(isinstance(D, Deployment), repr(D), str(plain), type(D.bind()) is Application)
print(
    D.name, D.num_replicas, D.max_ongoing_requests, D.max_queued_requests, D.user_config, D.ray_actor_options
)
print(D.func_or_class.__name__, plain.func_or_class(3), D.version, D.logging_config)
print(
    plain.name, plain.num_replicas, plain.max_ongoing_requests, plain.max_queued_requests, plain.user_config
)
print(plain.ray_actor_options)
E1 = D.options(name="E", num_replicas=1, user_config={"a": 2})
print(
    E1.name, E1.num_replicas, E1.max_ongoing_requests, E1.user_config, D.name, D.num_replicas, D.user_config
)
print(
    D == D.options(),
    D == E1,
    D.options(name="D") == D,
    E1 is D,
    hash(D) == hash(D) if Deployment.__hash__ else None,
)
auto = D.options(num_replicas="auto")
print(auto.name)
scaled = plain.options(autoscaling_config=AutoscalingConfig(min_replicas=2, max_replicas=3))
print(scaled.name, plain.num_replicas)
print(serve.deployment(name="n", num_replicas=3)(lambda: 1).name, serve.deployment(lambda: 1).name)
print(D.options(user_config=None).user_config)
a, b = D.bind(), D.bind(2)
print(a is b, type(a).__name__, hasattr(a, "_bound_deployment"))
try:
    D()
except Exception as e:
    print(type(e).__name__, "bind" in str(e) or "deploy" in str(e))
try:
    D.remote()
except AttributeError as e:
    print("AttributeError", str(e))
