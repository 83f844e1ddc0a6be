"""Options of deployments as the configurations that the controller gets."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import muster as serve
from muster.autoscaling_policy import default_autoscaling_policy
from muster.config import AutoscalingPolicy as ServePolicy
from muster.sdk.build import build_app
from muster.sdk.code import CodeUnpicklable
from muster.sdk.deployments import Deployment
from muster.sdk.translate import deploy_command
from serve_common.config.autoscaling import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    PolicyScope,
)
from serve_common.config.backend import BackendConfig
from serve_common.errors import BadField, LimitReached
from serve_common.protocol.code import digest_code
from serve_common.protocol.evaluation import POLICY_BYTES_MAX


@serve.deployment
class Model:
    def __call__(self) -> str:
        return "model"


def backend_config(deployment: Deployment) -> BackendConfig:
    app = build_app(deployment.bind(), name="app", route_prefix="/")
    [spec] = deploy_command(app, None, external_scaler=False).deployments
    return spec.backend_config


def test_an_update_replaces_no_more_replicas_at_a_time_than_its_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = backend_config(Model.options(num_replicas=10, rolling_update_percentage=0.5))
    assert (config.max_surge_percent, config.max_unavailable_percent) == (50.0, 50.0)
    assert not caplog.records
    chosen = backend_config(Model.options(rolling_update_percentage=0.5, max_surge_percent=10))
    assert (chosen.max_surge_percent, chosen.max_unavailable_percent) == (10.0, 50.0)
    assert backend_config(Model).max_unavailable_percent == 20.0


def version(deployment: Deployment, *, is_file: bool) -> str | None:
    app = build_app(deployment.bind(), name="app", route_prefix="/")
    app_config = {"name": "app"} if is_file else None
    [spec] = deploy_command(app, None, external_scaler=False, app_config=app_config).deployments
    return spec.version


@pytest.mark.parametrize("options", [{"user_config": {"a": 1}}, {"max_ongoing_requests": 7}])
def test_what_is_run_with_other_settings_is_a_new_version_and_a_file_with_them_is_none(
    options: dict[str, Any],
) -> None:
    changed = Model.options(**options)
    assert version(changed, is_file=False) == version(changed, is_file=False) != version(Model, is_file=False)
    assert version(changed, is_file=True) == version(Model, is_file=True)


def test_what_is_run_with_another_number_of_replicas_keeps_those_that_run() -> None:
    assert version(Model.options(num_replicas=3), is_file=False) == version(Model, is_file=False)


def test_an_application_has_one_ingress_as_in_ray_serve() -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None: ...

    @serve.deployment
    @serve.ingress(asgi)
    class Ingress:
        def __init__(self, inner: Any = None) -> None: ...

    assert build_app(Ingress.bind(Model.bind()), name="app", route_prefix="/").ingress == "Ingress"
    with pytest.raises(
        serve.exceptions.RayServeException, match='multiple FastAPI deployments in application "app"'
    ):
        build_app(Ingress.bind(Ingress.bind()), name="app", route_prefix="/")


def test_replicas_may_call_other_applications() -> None:
    assert backend_config(Model).may_call == ("*",)


def test_a_directory_of_logs_is_one_of_the_programs_where_it_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, sent in (("logs", str(tmp_path / "logs")), ("/var/own", "/var/own"), (None, "")):
        config = backend_config(Model.options(logging_config={"logs_dir": given})).logging_config
        assert config is not None
        assert config.logs_dir == sent


def policy_of(function: Any, **kwargs: Any) -> tuple[AutoscalingPolicy, dict[str, bytes]]:
    """The policy that the controller gets, and all that is uploaded."""
    config = {"max_replicas": 2, "policy": {"policy_function": function, "policy_kwargs": kwargs}}
    app = build_app(Model.options(autoscaling_config=config).bind(), name="app", route_prefix="/")
    [spec] = deploy_command(app, None, external_scaler=False).deployments
    assert spec.backend_config.autoscaling_config is not None
    return spec.backend_config.autoscaling_config.policy, app.uploads


class Policy:
    def __call__(self, context: object) -> int:
        return 1


async def later(context: object) -> int:
    return 1


def test_a_policy_that_only_the_program_has_is_uploaded_and_an_installed_one_is_named() -> None:
    for named in ("nowhere.policies:double", "nowhere.policies.double"):
        assert policy_of(named, most=3)[0] == AutoscalingPolicy(
            policy_function="nowhere.policies:double", policy_kwargs={"most": 3}
        )
    for installed in (json.dumps, "json:dumps"):
        assert policy_of(installed)[0] == AutoscalingPolicy(policy_function="json:dumps")
    for mine, name in (
        (lambda _: 1, f"{__name__}:function"),
        (Policy, f"{__name__}:Policy"),
        (f"{__name__}:Policy", f"{__name__}:Policy"),
        (Policy(), f"{__name__}:Policy"),
    ):
        policy, uploads = policy_of(mine)
        assert policy.policy_function == name
        assert digest_code(uploads[policy.code]) == policy.code
        assert policy_of(mine)[0] == policy, "the same policy again is the same configuration"
    for default in (
        "muster.autoscaling_policy:default_autoscaling_policy",
        "ray.serve.autoscaling_policy.replica_queue_length_autoscaling_policy",
        default_autoscaling_policy,
    ):
        assert policy_of(default)[0] == AutoscalingPolicy()


def test_the_policy_of_an_application_is_that_of_all_that_are_autoscaled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = {"max_replicas": 2, "policy": {"policy_function": Policy}}
    app = build_app(
        Model.options(name="Front", autoscaling_config=own).bind(
            Model.options(name="Back", num_replicas="auto").bind(), Model.options(name="Fixed").bind()
        ),
        name="app",
        route_prefix="/",
        autoscaling_policy=ServePolicy(policy_function="json:dumps"),
    )
    specs = {spec.name: spec for spec in deploy_command(app, None, external_scaler=False).deployments}
    policies = {
        name: spec.backend_config.autoscaling_config and spec.backend_config.autoscaling_config.policy
        for name, spec in specs.items()
    }
    shared = policies["Front"]
    assert shared is not None
    assert (shared.policy_function, shared.scope) == ("json:dumps", PolicyScope.APPLICATION)
    assert digest_code(app.uploads[shared.code]) == shared.code, "an installed function travels by name"
    assert policies == {"Front": shared, "Back": shared, "Fixed": None}
    assert "replaces that of the deployment 'Front'" in caplog.text
    with pytest.raises(BadField, match=r"autoscaling_policy: nowhere\.policies:both cannot be imported"):
        build_app(
            Model.bind(),
            name="app",
            route_prefix="/",
            autoscaling_policy=ServePolicy(policy_function="nowhere.policies:both"),
        )


def test_a_policy_that_cannot_decide_or_travel_is_refused() -> None:
    data, lock = b"x" * POLICY_BYTES_MAX, threading.Lock()
    for function, error, said in (
        (later, BadField, "async function"),
        ("json:nothing", BadField, "the module json has no nothing"),
        (lambda _: len(data), LimitReached, "Model: autoscaling_config.policy: .* at most 524,288 travel"),
        (lambda _: lock, CodeUnpicklable, "Model: autoscaling_config.policy.*lock"),
    ):
        with pytest.raises(error, match=said):
            policy_of(function)


def test_a_policy_in_the_program_is_dumped_by_its_name() -> None:
    dumped = ServePolicy(policy_function=Policy).model_dump(mode="json")
    assert dumped == {"policy_function": f"{__name__}.Policy", "policy_kwargs": {}}


def test_a_burst_holds_replicas_no_longer_than_the_programs_own_delay() -> None:
    config = {"min_replicas": 1, "max_replicas": 3}
    for delay_s, hold_s in ((0.5, 0.5), (600.0, 60.0)):
        translated = backend_config(Model.options(autoscaling_config=config | {"downscale_delay_s": delay_s}))
        assert translated.autoscaling_config is not None
        assert translated.autoscaling_config.panic_hold_s == hold_s


@pytest.mark.parametrize(
    ("running", "requests", "wanted"), [(2, 7.0, (3.5, {})), (0, 7.0, (4, {"n": 1})), (0, 0.0, (3, {}))]
)
def test_the_default_policy_can_be_built_upon(
    running: int, requests: float, wanted: tuple[float, dict[str, int]]
) -> None:
    context = AutoscalingContext(
        deployment_name="Model",
        app_name="app",
        current_num_replicas=running,
        target_num_replicas=3,
        total_num_requests=requests,
        total_queued_requests=0.0,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=9,
        policy_state={"n": 1},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(max_replicas=9, target_ongoing_requests=2.0, upscaling_factor=3.5),
    )
    assert default_autoscaling_policy(context) == wanted
    with pytest.raises(BadField, match="config"):
        default_autoscaling_policy(msgspec.structs.replace(context, config=None))
