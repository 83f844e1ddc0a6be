import pydantic

from ray.serve import schema
from ray.serve.config import AutoscalingConfig, BackpressureConfig, HTTPOptions, RequestRouterConfig
from ray.serve.schema import (
    DeploymentSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

CASES = [
    (AutoscalingConfig, dict(min_replicas=5, max_replicas=2)),
    (AutoscalingConfig, dict(min_replicas=-1)),
    (AutoscalingConfig, dict(max_replicas=0)),
    (AutoscalingConfig, dict(min_replicas=1, max_replicas=3, initial_replicas=4)),
    (AutoscalingConfig, dict(target_ongoing_requests=0)),
    (AutoscalingConfig, dict(upscale_delay_s=-1)),
    (AutoscalingConfig, dict(metrics_interval_s=0)),
    (AutoscalingConfig, dict(aggregation_function="median")),
    (AutoscalingConfig, dict(max_replicas="many")),
    (AutoscalingConfig, dict(unknown=1)),
    (BackpressureConfig, dict(status_code=500)),
    (BackpressureConfig, dict(retry_after_s=-1)),
    (HTTPOptions, dict(port="x")),
    (HTTPOptions, dict(location="Nowhere")),
    (RequestRouterConfig, dict(request_routing_stats_period_s=0)),
    (RequestRouterConfig, dict(backoff_multiplier=-1)),
    (LoggingConfig, dict(log_level="LOUD")),
    (LoggingConfig, dict(encoding="XML")),
    (LoggingConfig, dict(nope=1)),
    (LoggingConfig, dict(additional_log_standard_attrs=["nonsense"])),
    (RayActorOptionsSchema, dict(num_cpus=-1)),
    (RayActorOptionsSchema, dict(num_cpu=1)),
    (DeploymentSchema, dict()),
    (DeploymentSchema, dict(name="a", num_replicas=-1)),
    (DeploymentSchema, dict(name="a", num_replicas="many")),
    (DeploymentSchema, dict(name="a", max_ongoing_requests=0)),
    (DeploymentSchema, dict(name="a", num_replicas=2, autoscaling_config={"max_replicas": 2})),
    (ServeApplicationSchema, dict()),
    (ServeApplicationSchema, dict(import_path="nodots")),
    (ServeApplicationSchema, dict(import_path="a:b:c")),
    (ServeApplicationSchema, dict(import_path="a.b", route_prefix="x")),
    (ServeApplicationSchema, dict(import_path="a.b", route_prefix="/x/")),
    (ServeApplicationSchema, dict(import_path="a.b", route_prefix="/{x}")),
    (ServeApplicationSchema, dict(import_path="a.b", deployments=[{"name": "d"}, {"name": "d"}])),
    (ServeDeploySchema, dict()),
    (ServeDeploySchema, dict(applications=[{"import_path": "a.b"}, {"import_path": "a.c"}])),
    (
        ServeDeploySchema,
        dict(applications=[{"import_path": "a.b", "name": "x"}, {"import_path": "a.c", "name": "y"}]),
    ),
    (ServeDeploySchema, dict(applications=[{"import_path": "a.b", "name": ""}])),
    (ServeDeploySchema, dict(applications=[{"import_path": "a.b", "name": "x", "port": 1}])),
]
for model, kwargs in CASES:
    try:
        model(**kwargs)
        print(model.__name__, sorted(kwargs.items(), key=str), "accepted")
    except pydantic.ValidationError as e:
        print(
            model.__name__,
            sorted(kwargs),
            "ValidationError",
            [str(loc) for err in e.errors() for loc in err["loc"][:1] if loc != "applications"][:1],
        )
    except Exception as e:
        print(model.__name__, sorted(kwargs), type(e).__name__)
try:
    AutoscalingConfig(min_replicas=5, max_replicas=2)
except ValueError as e:
    print("min_replicas" in str(e), "max_replicas" in str(e))
