"""The edges that all services have alike: NATS by nats-py, the operations port, logs and the clock."""

from __future__ import annotations
