from ray import serve
from ray.serve.config import (
    AggregationFunction,
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    ControllerOptions,
    GangSchedulingConfig,
    HTTPOptions,
    ProxyLocation,
    RequestRouterConfig,
    gRPCOptions,
)

a = AutoscalingConfig()
d = a.model_dump(exclude={"policy"})
for key in sorted(d):
    print(key, d[key])
print(a.policy.policy_kwargs, a.policy.policy_function.endswith("default_autoscaling_policy"))
b = AutoscalingConfig(min_replicas=1, max_replicas=4, target_ongoing_requests=3)
print(b == AutoscalingConfig(min_replicas=1, max_replicas=4, target_ongoing_requests=3), a == b)
print(b.min_replicas, b.max_replicas, b.target_ongoing_requests, b.initial_replicas)
print(sorted(b.model_dump(exclude_unset=True).items()))
print(AutoscalingConfig(aggregation_function="max").aggregation_function)
print(AutoscalingConfig(aggregation_function=AggregationFunction.MIN).aggregation_function.value)
print([x.value for x in AggregationFunction], [x.value for x in ProxyLocation])
print(AutoscalingConfig(upscaling_factor=0.5, downscaling_factor=0.2).upscaling_factor)
print(b.get_upscaling_factor(), b.get_downscaling_factor(), b.get_target_ongoing_requests())
print(AutoscalingPolicy(policy_kwargs={"a": 1}).policy_kwargs)
r = RequestRouterConfig()
print(
    r.request_routing_stats_period_s,
    r.request_routing_stats_timeout_s,
    r.initial_backoff_s,
    r.backoff_multiplier,
)
print(r.max_backoff_s, r.request_router_kwargs)
h = HTTPOptions(port=8123)
print(
    h.host,
    h.port,
    h.root_path,
    h.root_url,
    h.request_timeout_s,
    h.keep_alive_timeout_s,
    h.num_cpus,
    h.middlewares,
)
print(h.ssl_keyfile, h.ssl_certfile, h.ssl_ca_certs, h.location)
print(HTTPOptions(host=None).host, HTTPOptions(location="HeadOnly").location)
g = gRPCOptions()
print(g.port, g.grpc_servicer_functions, g.request_timeout_s)
p = BackpressureConfig()
print(p.status_code, p.retry_after_s, BackpressureConfig(status_code=429, retry_after_s=2.5))
print(ControllerOptions().runtime_env)
print(GangSchedulingConfig(gang_size=2).gang_size, ProxyLocation("EveryNode") is ProxyLocation.EveryNode)
print(serve.HTTPOptions is HTTPOptions)
