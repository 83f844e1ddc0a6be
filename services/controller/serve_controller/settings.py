"""What a controller process is told by its environment."""

from __future__ import annotations

import msgspec

from serve_common.names import ControllerId
from serve_common.settings import (
    BusSettings,
    Environment,
    OperationsSettings,
    read_bus_settings,
    read_operations_settings,
)
from serve_controller.shell.crash_mode import CrashMode, read_crash_mode


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is fixed while the process lives."""

    controller_id: ControllerId
    """The same over a restart lets the new process lead at once, without waiting for its own old lease."""
    postgres_dsn: str
    postgres_password: str
    bus: BusSettings
    operations: OperationsSettings
    crash_mode: CrashMode | None = None
    """For tests only: where this process kills itself."""

    def __repr__(self) -> str:
        return f"ControllerSettings(controller_id={self.controller_id!r})"


def read_settings(environment: Environment) -> ControllerSettings:
    """Read and check everything; raises `BadField` naming the variable."""
    return ControllerSettings(
        controller_id=ControllerId(environment.identity("SERVE_CONTROLLER_ID")),
        postgres_dsn=environment.text("SERVE_POSTGRES_DSN", "postgresql://muster@127.0.0.1:5432/muster"),
        postgres_password=environment.secret("SERVE_POSTGRES_PASSWORD"),
        bus=read_bus_settings(environment, "controller"),
        operations=read_operations_settings(environment, 9101),
        crash_mode=read_crash_mode(environment),
    )
