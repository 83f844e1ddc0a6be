"""The proxy's edges: one file per outside thing."""

from __future__ import annotations
