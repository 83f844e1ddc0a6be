"""`muster up`: the whole stack as processes of this machine.

Why a package of its own: it needs servers and services that a client of a remote stack does not install. The names
listed here are its interface.
"""

from __future__ import annotations

from muster.embedded.options import (
    DEFAULT_STATE_DIR,
    AlreadyRunning,
    PortTaken,
    StackFailed,
    StackOptions,
    StartFailed,
    StatePaths,
)
from muster.embedded.process import Happened, ProcessEvent, RunningProcess
from muster.embedded.run_record import RunRecord, running_stack
from muster.embedded.stack import EmbeddedStack

__all__ = [
    "DEFAULT_STATE_DIR",
    "AlreadyRunning",
    "EmbeddedStack",
    "Happened",
    "PortTaken",
    "ProcessEvent",
    "RunRecord",
    "RunningProcess",
    "StackFailed",
    "StackOptions",
    "StartFailed",
    "StatePaths",
    "running_stack",
]
