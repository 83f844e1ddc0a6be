"""Declaring: the decorator, its options, and what is refused with which exception."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pydantic import ValidationError

import muster as serve
from muster.autoscaling_policy import default_autoscaling_policy
from muster.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    HTTPOptions,
    ProxyLocation,
    RequestRouterConfig,
)
from muster.schema import DeploymentSchema, LoggingConfig, ServeApplicationSchema, ServeDeploySchema
from muster.sdk.build import build_app
from muster.sdk.translate import deploy_command
from serve_common.api.commands import DeploymentSpec
from serve_common.config.backend import ReplicaPolicyName
from serve_common.config.rollout import RolloutConfig


class Model:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __call__(self, request: Any) -> Any:
        return request


def deployed(deployment: Any) -> DeploymentSpec:
    app = build_app(deployment.bind(), name="default", route_prefix="/")
    command = deploy_command(app, None, external_scaler=False)
    [spec] = command.deployments
    return spec


def test_the_decorator_works_bare_and_with_options() -> None:
    bare, named = serve.deployment(Model), serve.deployment(name="other", num_replicas=3)(Model)
    assert isinstance(bare, serve.Deployment)
    assert (bare.name, bare.num_replicas, bare.func_or_class) == ("Model", 1, Model)
    assert (named.name, named.num_replicas) == ("other", 3)


def test_defaults_are_those_of_ray_serve() -> None:
    spec = deployed(serve.deployment(Model))
    config = spec.backend_config
    assert (config.max_concurrent_queries, config.max_queued_requests) == (5, -1)
    assert config.max_constructor_retry_count == 3  # of each replica; 20 of all
    assert deployed(serve.deployment(num_replicas=9)(Model)).backend_config.max_constructor_retry_count == 20
    assert (config.health_check_period_s, config.health_check_timeout_s) == (10, 30)
    assert config.graceful_shutdown_timeout_s == 20
    assert spec.replica_config.ray_actor_options.num_cpus == 1


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"num_replicas": 4}, "num_replicas", 4),
        ({"user_config": {"a": 1}}, "user_config", {"a": 1}),
        ({"max_ongoing_requests": 7}, "max_concurrent_queries", 7),
        ({"max_queued_requests": 9}, "max_queued_requests", 9),
        ({"graceful_shutdown_timeout_s": 3}, "graceful_shutdown_timeout_s", 3),
        ({"health_check_period_s": 3}, "health_check_period_s", 3),
        ({"health_check_timeout_s": 3}, "health_check_timeout_s", 3),
        ({"max_constructor_retry_count": 3}, "max_constructor_retry_count", 3),
        ({"max_replicas_per_node": 2}, "max_replicas_per_host", 2),
        ({"max_surge_percent": 50}, "max_surge_percent", 50),
        ({"rollout": {"steps": ["5%", "100%"]}}, "rollout", RolloutConfig(steps=("5%", "100%"))),
    ],
)
def test_each_option_reaches_the_backend(options: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(deployed(serve.deployment(**options)(Model)).backend_config, field) == value
    assert getattr(deployed(serve.deployment(Model).options(**options)).backend_config, field) == value


def test_times_of_ray_serves_polling_have_no_effect_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    deployed(serve.deployment(request_router_config={"max_backoff_s": 2})(Model))

    assert "max_backoff_s has no effect" in caplog.text


def test_a_policy_can_be_had_from_its_configuration() -> None:
    assert AutoscalingConfig().policy.get_policy() is default_autoscaling_policy
    assert AutoscalingPolicy(policy_function=deployed).get_policy() is deployed
    for path in ("json:dumps", "json.dumps", "json:JSONEncoder.encode"):
        assert AutoscalingPolicy(policy_function=path).get_policy().__module__.startswith("json")
    with pytest.raises(ModuleNotFoundError):
        AutoscalingPolicy(policy_function="not.there:policy").get_policy()


def test_structured_options_reach_the_backend_as_dict_and_as_object() -> None:
    for backpressure in (
        {"status_code": 429, "retry_after_s": 5},
        BackpressureConfig(status_code=429, retry_after_s=5),
    ):
        config = deployed(serve.deployment(backpressure_config=backpressure)(Model)).backend_config
        assert (config.backpressure_config.status_code, config.backpressure_config.retry_after_s) == (429, 5)
    for router in (
        {"request_router_class": "ray.serve.experimental.round_robin_router:RoundRobinRouter"},
        RequestRouterConfig(request_router_class="x:RoundRobinRequestRouter"),
    ):
        config = deployed(serve.deployment(request_router_config=router)(Model)).backend_config
        assert config.replica_policy is ReplicaPolicyName.ROUND_ROBIN
    for scaling in (
        {"min_replicas": 2, "max_replicas": 5},
        AutoscalingConfig(min_replicas=2, max_replicas=5),
    ):
        found = deployed(
            serve.deployment(autoscaling_config=scaling)(Model)
        ).backend_config.autoscaling_config
        assert found is not None
        assert (found.min_replicas, found.max_replicas, found.target_ongoing_requests) == (2, 5, 2)
    actor = {"num_cpus": 0.5, "num_gpus": 1, "memory": 1024, "resources": {"tpu": 2}}
    found_actor = deployed(serve.deployment(ray_actor_options=actor)(Model)).replica_config.ray_actor_options
    assert (found_actor.num_cpus, found_actor.num_gpus, found_actor.memory) == (0.5, 1, 1024)
    assert found_actor.resources == {"tpu": 2}


def test_auto_is_one_to_a_hundred_replicas_and_takes_what_is_given() -> None:
    auto = serve.deployment(num_replicas="auto")(Model).deployment_options.autoscaling_config
    assert auto is not None
    assert (auto.min_replicas, auto.max_replicas, auto.target_ongoing_requests) == (1, 100, 2)
    changed = serve.deployment(Model).options(num_replicas="auto", autoscaling_config={"max_replicas": 7})
    found = changed.deployment_options.autoscaling_config
    assert found is not None
    assert (found.min_replicas, found.max_replicas) == (1, 7)
    fixed = changed.options(num_replicas=2)
    assert fixed.num_replicas == 2
    assert fixed.deployment_options.autoscaling_config is None


def test_options_copies_and_keeps_the_others() -> None:
    first = serve.deployment(num_replicas=2, max_ongoing_requests=9)(Model)
    second = first.options(num_replicas=3, name="second")
    assert (first.name, first.num_replicas) == ("Model", 2)
    assert (second.name, second.num_replicas, second.max_ongoing_requests) == ("second", 3, 9)
    assert first != second
    assert first == first.options()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nonsense": 1}, TypeError, "unexpected keyword argument 'nonsense'"),
        ({"version": "v1"}, ValueError, "has been removed. Serve manages"),
        ({"num_replicas": 0}, ValueError, "larger than 0"),
        ({"num_replicas": -1}, ValidationError, "greater than or equal to 0"),
        ({"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}}, ValueError, "not allowed when"),
        ({"max_ongoing_requests": None}, ValueError, "non-null"),
        ({"max_ongoing_requests": 0}, ValidationError, "greater than 0"),
        ({"max_queued_requests": 0}, ValidationError, "-1 \\(no limit\\)"),
        ({"user_config": object()}, ValidationError, "not JSON-serializable"),
        ({"health_check_period_s": 0}, ValidationError, "greater than 0"),
        (
            {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}},
            ValidationError,
            "max_replicas \\(2\\)",
        ),
        ({"backpressure_config": {"status_code": 500}}, ValidationError, "status_code"),
        ({"logging_config": {"log_level": "LOUD"}}, ValidationError, "log_level"),
        ({"ray_actor_options": {"max_restarts": 1}}, ValueError, "not allowed"),
        ({"ray_actor_options": {"accelerator_type": "A100"}}, ValueError, "custom resource"),
        ({"ray_actor_options": {"runtime_env": {"conda": "x"}}}, ValueError, "image of the replica hosts"),
        ({"ray_actor_options": {"num_cpus": -1}}, ValueError, "cannot be negative"),
        ({"ray_actor_options": {"resources": {"GPU": 1}}}, ValueError, "instead of 'CPU' and 'GPU'"),
        ({"ray_actor_options": {"resources": []}}, TypeError, "resources must be a dict"),
        ({"ray_actor_options": []}, TypeError, "Expected a dictionary"),
        ({"max_replicas_per_node": 101}, ValueError, r"\[1, 100\]"),
        ({"max_replicas_per_node": "2"}, TypeError, "Expected None or an integer"),
        ({"placement_group_bundles": [{"CPU": 1}]}, ValueError, "ray_actor_options"),
        ({"gang_scheduling_config": {"gang_size": 2}}, ValueError, "one by one"),
        ({"deployment_actors": [{}]}, ValueError, "bind another deployment"),
        ({"request_router_config": {"request_router_class": "own:Router"}}, ValidationError, "session_id"),
        ({"request_router_config": {"max_backoff_s": 0}}, ValidationError, "greater than 0"),
        ({"rolling_update_percentage": 2}, ValidationError, "less than or equal to 1"),
        ({"rollout": {"step": []}}, ValidationError, "unknown field `step`"),
        ({"rollout": {"steps": ["5%"]}}, ValidationError, r"rollout\.steps: must end with 100%"),
    ],
)
def test_what_cannot_be_accepted_fails_at_the_decorator(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        serve.deployment(**options)(Model)
    with pytest.raises(error, match=text):
        serve.deployment(Model).options(**options)


def test_only_the_decorator_makes_deployments() -> None:
    with pytest.raises(RuntimeError, match=r"@serve\.deployment"):
        serve.Deployment("x", Model, None, {})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="bind"):
        serve.deployment(Model)()
    with pytest.raises(TypeError, match="class or function"):
        serve.deployment()(3)
    with pytest.raises(TypeError, match="must be a string"):
        serve.deployment(name=3)(Model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'#'"):
        serve.deployment(name="a#b")(Model)
    with pytest.raises(TypeError, match="call its bind"):
        serve.run(serve.deployment(Model))  # type: ignore[arg-type]


def test_a_function_takes_no_arguments() -> None:
    @serve.deployment
    def echo(request: Any) -> Any:
        return request

    assert echo.name == "echo"
    echo.bind()
    with pytest.raises(ValueError, match="init_args not supported"):
        echo.bind(1)
    with pytest.raises(ValueError, match="init_kwargs not supported"):
        echo.bind(a=1)


def test_logging_config_is_a_dict_or_an_object() -> None:
    for given in ({"log_level": "DEBUG"}, LoggingConfig(log_level="DEBUG")):
        config = serve.deployment(logging_config=given)(Model).logging_config
        assert config is not None
        assert config["log_level"] == "DEBUG"
    assert LoggingConfig(log_level=10).log_level == "DEBUG"


def test_logging_can_be_set_on_the_object_itself() -> None:
    made = serve.deployment(Model)
    made.set_logging_config({"log_level": "DEBUG"})
    assert made.logging_config is not None
    assert made.logging_config["log_level"] == "DEBUG"
    with pytest.raises(ValueError, match="log_level"):
        made.set_logging_config({"log_level": "LOUD"})


def test_the_options_of_a_file_are_those_that_are_set() -> None:
    schema = DeploymentSchema(name="Model", num_replicas=2, ray_actor_options={"num_cpus": 0.5})
    assert schema.options() == {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
    changed = serve.deployment(Model).options(**schema.options())
    assert (changed.num_replicas, changed.ray_actor_options["num_cpus"]) == (2, 0.5)
    with pytest.raises(ValidationError):
        DeploymentSchema(name="Model", num_replicas=0)


def test_models_of_files_ignore_unknown_fields_as_ray_serves_do() -> None:
    """A file is checked for them before, with its lines."""
    assert DeploymentSchema.model_validate({"name": "Model", "route_prefix": "/x"}).options() == {}
    app = {"import_path": "a.b", "later": 1}
    assert (
        ServeDeploySchema.model_validate({"applications": [app], "later": 1}).applications[0].name
        == "default"
    )


def test_an_interval_of_metrics_is_deprecated_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
        config = AutoscalingConfig(metrics_interval_s=5)
    assert config.metrics_interval_s == 5
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
        serve.deployment(autoscaling_config={"metrics_interval_s": 5})(Model)
    AutoscalingConfig()


def test_http_options_without_a_host_are_those_of_no_proxy() -> None:
    assert HTTPOptions(host=None).location is ProxyLocation.Disabled
    with pytest.warns(DeprecationWarning, match="`location` in HTTPOptions is deprecated"):
        assert HTTPOptions(location="HeadOnly").location is ProxyLocation.HeadOnly
    assert HTTPOptions().location is None


@pytest.mark.parametrize(
    "options",
    [
        {"backpressure_config": {"status_code": 500}},
        {"gang_scheduling_config": {"gang_size": 0}},
        {"graceful_shutdown_wait_loop_s": -1},
        {"graceful_shutdown_timeout_s": -1},
        {"health_check_period_s": 0},
        {"health_check_timeout_s": 0},
        {"max_queued_requests": "5"},
        {"rolling_update_percentage": 1.5},
        {"max_surge_percent": 101},
    ],
)
def test_the_options_of_a_file_are_checked_where_they_are_written(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        DeploymentSchema(name="Model", **options)


def test_a_file_has_ray_serves_limits_and_templates() -> None:
    for capacity in (-1, 101):
        with pytest.raises(ValidationError, match="target_capacity"):
            ServeDeploySchema(applications=[], target_capacity=capacity)
    empty = ServeApplicationSchema.get_empty_schema_dict()
    assert empty == {"import_path": "", "runtime_env": {}, "deployments": []}
    with pytest.raises(ValidationError, match="may not start or end with a dot"):
        ServeApplicationSchema(import_path="module.")


def test_nested_applications_become_handles_wherever_they_stand() -> None:
    child = serve.deployment(name="Child")(Model)
    one = child.bind(1)
    app = serve.deployment(name="Parent")(Model).bind(
        one, [one], {"k": child.bind(2)}, f=functools.partial(print, child.options(name="Third").bind())
    )
    built = build_app(app, name="shop", route_prefix="/")
    assert [each.name for each in built.deployments] == ["Child", "Child_1", "Third", "Parent"]
    assert built.ingress == "Parent"
