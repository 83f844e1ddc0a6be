"""`muster up`: the whole stack as processes of this machine.

Why a package of its own: it needs servers and services that a client of a remote stack does not install. The names
listed here are its interface; each is imported at its first use, for every command looks for a stack on this machine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from muster.embedded.options import (
        DEFAULT_STATE_DIR,
        AlreadyRunning,
        PortTaken,
        StackFailed,
        StackOptions,
        StartFailed,
        StatePaths,
    )
    from muster.embedded.process import Happened, ProcessEvent
    from muster.embedded.run_record import RunningProcess, RunRecord, running_stack
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

_HOMES: Final = {
    "muster.embedded.options": (
        "DEFAULT_STATE_DIR",
        "AlreadyRunning",
        "PortTaken",
        "StackFailed",
        "StackOptions",
        "StartFailed",
        "StatePaths",
    ),
    "muster.embedded.process": ("Happened", "ProcessEvent"),
    "muster.embedded.run_record": ("RunRecord", "RunningProcess", "running_stack"),
    "muster.embedded.stack": ("EmbeddedStack",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'muster.embedded' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found  # later accesses skip __getattr__
    return found
