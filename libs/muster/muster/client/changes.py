"""Every command of the admin API as a typed method: the request in, the reply out.

A reply means that the change is recorded, not that it is done; `AdminClient.wait_for_goal` waits for that.
"""

from __future__ import annotations

import uuid
from typing import Final

from muster.client.asking import Asking
from serve_common.wires.commands import (
    BACKUP_PAGE_BYTES_MAX,
    Change,
    ChangeReply,
    CreateBackend,
    CreateEndpoint,
    DeleteApplication,
    DeleteBackend,
    DeleteDeployment,
    DeleteEndpoint,
    Deploy,
    DeployApplication,
    DrainHost,
    PauseAutoscaling,
    Restore,
    RestoreReply,
    ResumeAutoscaling,
    Rollback,
    Scale,
    SetEndpointOptions,
    SetHttpOptions,
    SetTraffic,
    ShadowTraffic,
    Shutdown,
    ShutdownReply,
    UndrainHost,
    UpdateBackendConfig,
)

RESTORE_ATTEMPT_S: Final = 30.0
"""The whole file is checked with its last page."""


class Changes(Asking):
    """The commands. Part of `AdminClient`."""

    async def change(self, request: Change) -> ChangeReply:
        """Any command that answers with one goal."""
        reply: ChangeReply = await self._asker.ask(request)
        return reply

    async def deploy(self, request: Deploy) -> ChangeReply:
        """Make a deployment be as given."""
        return await self.change(request)

    async def delete_deployment(self, request: DeleteDeployment | str) -> ChangeReply:
        """Make a deployment not exist; an unknown name is a success without a goal. Its name alone will do."""
        return await self.change(DeleteDeployment(name=request) if isinstance(request, str) else request)

    async def deploy_application(self, request: DeployApplication) -> ChangeReply:
        """Make an application be these deployments, in one change: all or nothing. Those left out go away."""
        return await self.change(request)

    async def delete_application(self, request: DeleteApplication) -> ChangeReply:
        """Make an application and its deployments not exist. An unknown name is a success."""
        return await self.change(request)

    async def create_backend(self, request: CreateBackend) -> ChangeReply:
        """Make a backend be as given. The same configurations again make no new goal."""
        return await self.change(request)

    async def delete_backend(self, request: DeleteBackend) -> ChangeReply:
        """Make a backend not exist. Unknown: a success. Refused while an endpoint sends or copies traffic to it."""
        return await self.change(request)

    async def update_backend_config(self, request: UpdateBackendConfig) -> ChangeReply:
        """Change the given fields of a backend's configuration, also of a deployment's; the others stay."""
        return await self.change(request)

    async def scale(self, request: Scale) -> ChangeReply:
        """Make a backend have so many replicas. Autoscaling, where there is one, pauses until it is resumed."""
        return await self.change(request)

    async def pause_autoscaling(self, request: PauseAutoscaling | str) -> ChangeReply:
        """Leave a backend's number of replicas as it is. Its tag alone will do."""
        return await self.change(
            PauseAutoscaling(backend_tag=request) if isinstance(request, str) else request
        )

    async def resume_autoscaling(self, request: ResumeAutoscaling | str) -> ChangeReply:
        """Let a backend's number of replicas follow its load again. Its tag alone will do."""
        return await self.change(
            ResumeAutoscaling(backend_tag=request) if isinstance(request, str) else request
        )

    async def create_endpoint(self, request: CreateEndpoint) -> ChangeReply:
        """Make an endpoint. The same again makes no new goal; another one under the same name is refused."""
        return await self.change(request)

    async def delete_endpoint(self, request: DeleteEndpoint) -> ChangeReply:
        """Make an endpoint not exist; its backends stay. Unknown: a success."""
        return await self.change(request)

    async def set_traffic(self, request: SetTraffic) -> ChangeReply:
        """Say where an endpoint's requests go."""
        return await self.change(request)

    async def shadow_traffic(self, request: ShadowTraffic) -> ChangeReply:
        """Copy a proportion of an endpoint's requests to a backend whose answers are dropped."""
        return await self.change(request)

    async def set_endpoint_options(self, request: SetEndpointOptions) -> ChangeReply:
        """Change the given options of an endpoint, also of a deployment's; the others stay."""
        return await self.change(request)

    async def rollback(self, request: Rollback) -> ChangeReply:
        """Make a deployment or backend be again what it was."""
        return await self.change(request)

    async def set_http_options(self, request: SetHttpOptions) -> ChangeReply:
        """Change the given options of all proxies while they run; the others stay."""
        return await self.change(request)

    async def drain_host(self, request: DrainHost) -> ChangeReply:
        """Move every replica off a host, new ones first, and place none there."""
        return await self.change(request)

    async def undrain_host(self, request: UndrainHost) -> ChangeReply:
        """Place replicas on a host again. One that is not drained is a success."""
        return await self.change(request)

    async def restore(self, request: Restore) -> RestoreReply:
        """Send a page of a backup; with the last one everything becomes what the backup says. See `send_backup`."""
        reply: RestoreReply = await self._asker.ask(request, attempt_s=RESTORE_ATTEMPT_S)
        return reply

    async def send_backup(self, data: bytes, *, confirm: bool) -> RestoreReply:
        """Restore from the file of a backup or, without ``confirm``, only have it checked.

        Raises `BadField` that says what is wrong with the file; nothing is changed then.
        """
        upload_id, size = uuid.uuid4().hex, BACKUP_PAGE_BYTES_MAX
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        reply = RestoreReply()
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            reply = await self.restore(
                Restore(
                    upload_id=upload_id,
                    page=number,
                    pages=len(parts),
                    data=part,
                    confirm=confirm and is_last,
                )
            )
        return reply

    async def shutdown(self, request: Shutdown | None = None) -> ShutdownReply:
        """Delete every application, deployment, endpoint and backend."""
        reply: ShutdownReply = await self._asker.ask(request or Shutdown(confirm="everything"))
        return reply
