"""The client's way to the outside: NATS."""

from __future__ import annotations
