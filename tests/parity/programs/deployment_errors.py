from ray import serve

CASES = [
    dict(num_replicas=0),
    dict(num_replicas=-1),
    dict(num_replicas="x"),
    dict(num_replicas=1.5),
    dict(num_replicas=None),
    dict(max_ongoing_requests=0),
    dict(max_ongoing_requests=None),
    dict(max_queued_requests=-2),
    dict(nope=1),
    dict(health_check_period_s=-1),
    dict(health_check_timeout_s=0),
    dict(graceful_shutdown_timeout_s=-1),
    dict(graceful_shutdown_wait_loop_s=-1),
    dict(ray_actor_options={"num_cpus": -1}),
    dict(ray_actor_options={"foo": 1}),
    dict(ray_actor_options=1),
    dict(ray_actor_options={"name": "x"}),
    dict(autoscaling_config={"min_replicas": 3, "max_replicas": 1}),
    dict(num_replicas=2, autoscaling_config={"min_replicas": 1}),
    dict(num_replicas="auto", autoscaling_config={"max_replicas": 5}),
    dict(autoscaling_config={"nope": 1}),
    dict(autoscaling_config=None),
    dict(autoscaling_config=3),
    dict(name=3),
    dict(version="1"),
    dict(user_config={1, 2}),
    dict(logging_config={"log_level": "x"}),
    dict(logging_config=3),
    dict(max_replicas_per_node=0),
    dict(max_replicas_per_node=101),
    dict(max_constructor_retry_count=0),
    dict(rolling_update_percentage=0),
    dict(rolling_update_percentage=1.5),
    dict(backpressure_config={"status_code": 400}),
    dict(max_surge_percent=-1),
]
for kwargs in CASES:
    try:
        made = serve.deployment(**kwargs)(lambda: 1)
        print(kwargs, "ok", made.num_replicas)
    except Exception as e:
        print(kwargs, type(e).__name__)


@serve.deployment
class D:
    def __call__(self):
        return 1


for kwargs in [
    dict(num_replicas=0),
    dict(nope=1),
    dict(name=1),
    dict(max_ongoing_requests=-1),
    dict(user_config=D),
]:
    try:
        D.options(**kwargs)
        print("options ok")
    except Exception as e:
        print("options", sorted(kwargs), type(e).__name__)
for what in (D, 3, None, lambda: 1):
    try:
        serve.run(what)
    except Exception as e:
        print(type(e).__name__, str(e)[:70])
for prefix in ("nope", "/end/", "/{x}"):
    try:
        serve.run(D.bind(), route_prefix=prefix)
    except Exception as e:
        print(prefix, type(e).__name__)
try:
    serve.run(D.bind(), name="")
except serve.exceptions.RayServeException if hasattr(serve, "exceptions") else Exception as e:
    print(str(e))
try:
    serve.deployment(3)
except Exception as e:
    print(type(e).__name__)
try:
    D.bind(*[], **{"x": 1})
    print("bound")
except Exception as e:
    print(type(e).__name__)
try:

    @serve.ingress(object())
    class I:
        pass

    print("ingress of an object")
except Exception as e:
    print(type(e).__name__)
try:
    serve.ingress(lambda: 1)(3)
    print("ingress of a number")
except Exception as e:
    print(type(e).__name__)
