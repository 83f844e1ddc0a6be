"""Where the repository is, and the applications that tests deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
APPS: Final = Path(__file__).parent / "apps"
