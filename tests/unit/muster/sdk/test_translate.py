"""Options of deployments as the configurations that the controller gets."""

from __future__ import annotations

import pytest

import muster as serve
from muster.sdk.build import build_app
from muster.sdk.deployments import Deployment
from muster.sdk.translate import deploy_command
from serve_common.config.backend import BackendConfig
from serve_common.errors import BadField


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


def test_a_policy_that_the_controller_cannot_import_is_refused() -> None:
    config = {"min_replicas": 1, "max_replicas": 2}
    by_name = backend_config(
        Model.options(autoscaling_config=config | {"policy": {"policy_function": "policies:double"}})
    )
    assert by_name.autoscaling_config is not None
    assert by_name.autoscaling_config.policy.policy_function == "policies:double"
    with pytest.raises(BadField, match=r"cannot import .*<lambda>"):
        backend_config(
            Model.options(autoscaling_config=config | {"policy": {"policy_function": lambda _: 1}})
        )


def test_a_burst_holds_replicas_no_longer_than_the_programs_own_delay() -> None:
    config = {"min_replicas": 1, "max_replicas": 3}
    for delay_s, hold_s in ((0.5, 0.5), (600.0, 60.0)):
        translated = backend_config(Model.options(autoscaling_config=config | {"downscale_delay_s": delay_s}))
        assert translated.autoscaling_config is not None
        assert translated.autoscaling_config.panic_hold_s == hold_s
