"""The limits of what users configure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serve_common.config.backend import (
    BackendConfig,
    BackpressureConfig,
    CircuitBreaker,
    EndpointOptions,
    HttpOptions,
    LoggingConfig,
    OutlierEjection,
    RayActorOptions,
    ReplicaConfig,
    check_backend_config,
    check_endpoint_options,
    check_http_options,
    check_replica_config,
    merged,
)
from serve_common.config.runtime_env import setup_seconds
from serve_common.errors import BadField
from serve_common.values import NESTING_MAX, USER_CONFIG_BYTES_MAX


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_the_defaults_are_valid() -> None:
    assert check_backend_config(BackendConfig()) == BackendConfig()
    assert check_endpoint_options(EndpointOptions()) == EndpointOptions()
    assert check_http_options(HttpOptions()) == HttpOptions()
    config = ReplicaConfig(import_path="a.b:C.d")
    assert check_replica_config(config) is config


BACKENDS: list[tuple[str, Any]] = [
    ("num_replicas", -1),
    ("num_replicas", 10_001),
    ("num_replicas", 10**400),
    ("num_replicas", -(10**400)),
    ("max_concurrent_queries", 0),
    ("max_queued_requests", -2),
    ("graceful_shutdown_timeout_s", -0.1),
    ("graceful_shutdown_timeout_s", float("nan")),
    ("health_check_period_s", 0.0),
    ("health_check_timeout_s", float("inf")),
    ("start_timeout_s", 0.5),
    ("max_constructor_retry_count", 0),
    ("user_config", "x" * USER_CONFIG_BYTES_MAX),
    ("user_config", nested(NESTING_MAX + 1)),
    ("packing_num", 0),
    ("retry_budget_percent", 101.0),
    ("backpressure_config.status_code", BackpressureConfig(status_code=500)),
    ("backpressure_config.retry_after_s", BackpressureConfig(retry_after_s=-1.0)),
    ("outlier_ejection.max_ejected_percent", OutlierEjection(max_ejected_percent=51.0)),
    ("circuit_breaker.window_s", CircuitBreaker(window_s=float("nan"))),
    ("logging_config.log_level", LoggingConfig(log_level="LOUD")),
    ("logging_config.additional_log_standard_attrs", LoggingConfig(additional_log_standard_attrs=("shoe",))),
    ("logging_config.logs_dir", LoggingConfig(logs_dir="here")),
]
REPLICAS: list[tuple[str, Any]] = [
    ("import_path", ""),
    ("import_path", "digits"),
    ("import_path", "digits:"),
    ("import_path", ":Digits"),
    ("import_path", "a b:C"),
    ("import_path", "../x:C"),
    ("import_path", "m:C()"),
    ("import_path", "m:C:D"),
    ("import_path", "m" * 600 + ":C"),
    ("app_dir", "x" * 5000),
    ("app_dir", "a\0"),
    ("working_dir", "abc"),
    ("py_modules[1]", ("a" * 64, "b")),
    ("py_modules", tuple(f"{number:064x}" for number in range(65))),
    ("init_args", nested(NESTING_MAX + 1)),
    ("init_kwargs", {"x": "y" * USER_CONFIG_BYTES_MAX}),
]
ACTORS: list[tuple[dict[str, Any], str]] = [
    ({"num_cpus": -1.0}, "num_cpus"),
    ({"num_gpus": 1e9}, "num_gpus"),
    ({"memory": float("nan")}, "memory"),
    ({"resources": {"GPU": 1.0}}, "resources"),
    ({"resources": {"": 1.0}}, "resources"),
    ({"resources": {"x": -1.0}}, "resources.x"),
    ({"resources": {f"r{n}": 1.0 for n in range(33)}}, "resources"),
    ({"runtime_env": {"pip": []}}, "runtime_env.pip"),
    ({"runtime_env": {"env_vars": []}}, "runtime_env.env_vars"),
    ({"runtime_env": {"conda": "x"}}, "runtime_env.conda"),
    ({"runtime_env": {"working_dir": "."}}, "runtime_env.working_dir"),
    ({"runtime_env": {"pip": "r.txt"}}, "runtime_env.pip"),
    ({"runtime_env": {"pip": ["a", "b\nc"]}}, "runtime_env.pip[1]"),
    ({"runtime_env": {"pip": {"packages": []}}}, "runtime_env.pip.packages"),
    ({"runtime_env": {"pip": {"packages": ["a"], "x": 1}}}, "runtime_env.pip.x"),
    ({"runtime_env": {"pip": {"packages": ["a"], "pip_check": 1}}}, "runtime_env.pip.pip_check"),
    ({"runtime_env": {"uv": {"packages": ["a"], "uv_version": 1}}}, "runtime_env.uv.uv_version"),
    (
        {"runtime_env": {"uv": {"packages": ["a"], "uv_pip_install_options": "x"}}},
        "runtime_env.uv.uv_pip_install_options",
    ),
    ({"runtime_env": {"uv": ["a"], "pip": ["a"]}}, "runtime_env.uv"),
    ({"runtime_env": {"config": {"eager_install": True}}}, "runtime_env.config.eager_install"),
    ({"runtime_env": {"config": {"setup_timeout_seconds": 0}}}, "runtime_env.config.setup_timeout_seconds"),
    ({"runtime_env": {"env_vars": {"A=B": "c"}}}, "runtime_env.env_vars"),
    ({"runtime_env": {"env_vars": {"A": 1}}}, "runtime_env.env_vars.A"),
    ({"runtime_env": {"env_vars": {"A": "\0"}}}, "runtime_env.env_vars.A"),
]


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        *((BackendConfig(), f"backend_config.{path}", value) for path, value in BACKENDS),
        *((ReplicaConfig(import_path="m:C"), f"replica_config.{path}", value) for path, value in REPLICAS),
        *(
            (
                ReplicaConfig(import_path="m:C"),
                f"replica_config.ray_actor_options.{path}",
                RayActorOptions(**options),
            )
            for options, path in ACTORS
        ),
    ],
)
def test_a_value_out_of_its_limits_is_refused_with_its_path(config: Any, path: str, value: Any) -> None:
    check: Any = check_backend_config if isinstance(config, BackendConfig) else check_replica_config
    with pytest.raises(BadField) as refused:
        check(msgspec.structs.replace(config, **{path.split(".")[1].partition("[")[0]: value}))
    assert refused.value.field == path
    assert len(str(refused.value)) < 200


def test_of_a_group_of_fields_those_that_are_not_given_stay() -> None:
    config = BackendConfig(user_config={"a": 1}, outlier_ejection=OutlierEjection(ejection_time_s=3.0))
    partial = {"outlier_ejection": {"consecutive_failures": 2}, "user_config": {"b": 2}}
    changed = merged(config, partial, "config")
    assert changed.outlier_ejection == OutlierEjection(ejection_time_s=3.0, consecutive_failures=2)
    assert changed.user_config == {"b": 2}, "what users give as one value is one value"
    with pytest.raises(BadField, match="unknown"):
        merged(config, {"outlier_ejection": {"failures": 2}}, "config")


def test_what_is_just_within_the_limits_is_accepted() -> None:
    check_backend_config(BackendConfig(user_config=nested(NESTING_MAX)))
    check_backend_config(BackendConfig(num_replicas=0, max_queued_requests=-1, graceful_shutdown_timeout_s=0))
    check_backend_config(BackendConfig(user_config="x" * (USER_CONFIG_BYTES_MAX - 2)))


def test_packages_have_time_to_be_installed() -> None:
    assert setup_seconds({"env_vars": {"A": "b"}}) == 0
    assert setup_seconds({"pip": ["a"]}) == 600
    assert setup_seconds({"uv": ["a"], "config": {"setup_timeout_seconds": 5}}) == 5
    options = RayActorOptions(
        runtime_env={
            "uv": {
                "packages": ["a"],
                "uv_check": True,
                "uv_version": "==1",
                "uv_pip_install_options": ["-v"],
            },
            "config": {"setup_timeout_seconds": 5},
        }
    )
    config = ReplicaConfig(import_path="m:C", ray_actor_options=options)
    assert check_replica_config(config) is config
