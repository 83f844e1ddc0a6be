"""Options of deployments as the configurations that the controller gets."""

from __future__ import annotations

import pytest

import muster as serve
from muster.sdk.build import build_app
from muster.sdk.deployments import Deployment
from muster.sdk.translate import deploy_command
from serve_common.config.backend import BackendConfig


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
