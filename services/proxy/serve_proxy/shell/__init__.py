"""The loops and handlers that drive the proxy's decisions."""

from __future__ import annotations
