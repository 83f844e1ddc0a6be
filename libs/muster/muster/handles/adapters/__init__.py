"""What touches the driver of NATS."""

from __future__ import annotations
