"""How many replicas a backend should have: read loads in, decisions out, all pure."""

from __future__ import annotations
