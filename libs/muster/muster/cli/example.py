"""The example of `muster up --deploy-example`, so that the first minute ends with an answer of a real model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from muster.cli.deploy import intent_to_deploy
from muster.cli.exit_codes import ExitCode
from muster.cli.output import Progress, brief
from muster.cli.perform import perform
from muster.cli.ports import AdminPort
from muster.cli.up_report import seen_from
from muster.cli.wording import describe
from muster.embedded.options import CHECKOUT
from serve_common.errors import NotFound, PermanentError
from serve_common.names import deployment_tag
from serve_common.values.backend_config import BackendConfig
from serve_common.values.replica_config import RayActorOptions, ReplicaConfig
from serve_common.wires.commands import Deploy
from serve_common.wires.queries import GetDeploymentInfo
from serve_common.wires.views import DeploymentStatus, DeploymentView, GoalStatus

_ROUTE: Final = "/digits"
_DEPLOY_TIMEOUT_S: Final = 180.0
_HEALTHY_TIMEOUT_S: Final = 60.0
_LOOK_AGAIN_S: Final = 0.25


class ExampleDeployment:
    """Deploys examples/digits of this checkout, or finds it there."""

    name: Final = "digits"

    def __init__(self, directory: Path, http_url: str, examples: Path = CHECKOUT / "examples") -> None:
        """What to type is shown as seen from ``directory``."""
        self._directory = directory
        self._http_url = http_url
        self._folder = examples / "digits"
        self.is_serving = False

    async def ensure(self, admin: AdminPort, progress: Progress) -> list[str]:
        """Deploy it unless it is there, wait until it serves, and return lines for people.

        One that is there is left as it is: its user may have changed it. Raises `PermanentError` where there are no
        examples, and what the controller raises.
        """
        there = await self._find(admin)
        if there is not None:
            trouble = await self._wait_until_healthy(admin, progress)
            self.is_serving = trouble is None
            return (
                [f"error: {self.name}: {trouble}"]
                if trouble is not None
                else self._what_to_try(there.route_prefix)
            )
        if not self._folder.is_dir():
            raise PermanentError(f"there is no {self._folder}; examples come with the source")
        intent = intent_to_deploy(self._request())
        outcome = await perform(
            admin, intent, timeout_s=_DEPLOY_TIMEOUT_S, is_waiting=True, host="127.0.0.1", progress=progress
        )
        self.is_serving = outcome.exit_code is ExitCode.OK
        if not self.is_serving:
            return describe(outcome, intent)
        return [describe(outcome, intent)[0], *self._what_to_try(_ROUTE)]

    def _request(self) -> Deploy:
        return Deploy(
            name=deployment_tag(self.name),
            replica_config=ReplicaConfig(
                import_path="digits:Digits",
                app_dir=str(self._folder),
                ray_actor_options=RayActorOptions(num_cpus=0.5),
            ),
            backend_config=BackendConfig(num_replicas=2),
            route_prefix=_ROUTE,
            version="example",
        )

    async def _find(self, admin: AdminPort) -> DeploymentView | None:
        """None also for one that goes away or never came to serve: there is nothing to be kept."""
        try:
            found = await admin.get_deployment_info(GetDeploymentInfo(name=self.name))
        except NotFound:
            return None
        has_failed = found.status is DeploymentStatus.UNHEALTHY and found.goal_status is GoalStatus.FAILED
        return None if has_failed or found.status is DeploymentStatus.DELETING else found

    async def _wait_until_healthy(self, admin: AdminPort, progress: Progress) -> str | None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _HEALTHY_TIMEOUT_S
        while True:
            deployment = await admin.get_deployment_info(GetDeploymentInfo(name=self.name))
            if deployment.status is DeploymentStatus.HEALTHY:
                return None
            if loop.time() >= give_up_at:
                return f"is {deployment.status.value}: {brief(deployment.message)}"
            progress.say(deployment.message or deployment.status.value)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _what_to_try(self, route: str | None) -> list[str]:
        if route is None:
            return [f"{self.name} serves, without a route"]
        url = f"{self._http_url}{route}"
        sample = seen_from(self._directory, self._folder / "sample.png")
        evaluate = seen_from(self._directory, self._folder / "evaluate.py")
        python = seen_from(self._directory, sys.executable)
        return [
            f"{self.name} serves; try it:",
            "",
            f"  curl --data-binary @{sample} {url}",
            f"  {python} {evaluate} {url}",
            "",
        ]
