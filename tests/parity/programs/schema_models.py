from ray.serve.schema import (
    ApplicationStatus,
    DeploymentSchema,
    EncodingType,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

app = ServeApplicationSchema(
    import_path="mod:app", deployments=[{"name": "D", "num_replicas": 2, "user_config": {"a": 1}}]
)
print(app.name, app.route_prefix, app.import_path, app.args, app.runtime_env, app.logging_config)
print(app.deployment_names, app.deployments[0].num_replicas, app.deployments[0].user_config)
print(app.dict(exclude_unset=True))
print(app.model_dump(exclude_unset=True) == app.dict(exclude_unset=True))
d = DeploymentSchema(name="D", max_ongoing_requests=3, ray_actor_options={"num_cpus": 0.5})
print(d.model_dump(exclude_unset=True))
print(d.ray_actor_options.num_cpus, d.ray_actor_options.num_gpus, d == DeploymentSchema(name="D"))
print(RayActorOptionsSchema(num_cpus=1, resources={"a": 1}).model_dump(exclude_unset=True))
deploy = ServeDeploySchema(applications=[app.model_dump(exclude_unset=True)])
print(
    deploy.proxy_location.value,
    deploy.http_options.port,
    deploy.http_options.host,
    deploy.applications[0].name,
)
print(deploy.model_dump(exclude_unset=True))
print(ServeDeploySchema.model_validate({"applications": []}).applications)
parsed = ServeDeploySchema.parse_obj(
    {
        "proxy_location": "HeadOnly",
        "http_options": {"port": 9},
        "applications": [{"import_path": "a.b", "name": "x", "route_prefix": None}],
    }
)
print(parsed.proxy_location.value, parsed.http_options.port, parsed.applications[0].route_prefix)
print(HTTPOptionsSchema().model_dump())
print(gRPCOptionsSchema().model_dump())
log = LoggingConfig()
print(log.encoding, log.log_level, log.enable_access_log, log.logs_dir, log.additional_log_standard_attrs)
print(LoggingConfig(log_level=10).log_level, LoggingConfig(encoding="JSON").encoding)
print(EncodingType.JSON.value)
print(sorted(x.value for x in ApplicationStatus))
print(deploy.get_empty_schema_dict())
