"""Finds what an import path names.

Why apart: it alone touches ``sys.path``, and its errors are the first thing that a user of this system reads.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any


class UserCodeUnusable(Exception):
    """What the import path names cannot be served; the message says why."""


def import_named(import_path: str, app_dir: str) -> Any:
    """What ``module:attribute`` names, with ``app_dir`` put first on ``sys.path``; empty for none.

    Raises `UserCodeUnusable` and whatever importing raises.
    """
    if app_dir:
        if not Path(app_dir).is_dir():
            where = f"looked for on the machine {os.uname().nodename}"
            raise UserCodeUnusable(
                f"app_dir {app_dir} is not a directory that the replica host can see ({where})"
            )
        if app_dir not in sys.path:
            sys.path.insert(0, app_dir)
            importlib.invalidate_caches()
    module_name, _, attribute = import_path.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserCodeUnusable(f"{module_name} ({_origin(module_name)}) has no {attribute}")
        found = getattr(found, part)
    return found


def _origin(module_name: str) -> str:
    return getattr(sys.modules.get(module_name), "__file__", None) or "built in"
