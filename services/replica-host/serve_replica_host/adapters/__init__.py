"""The adapters: Ray, the control plane's NATS client and prometheus_client."""

from __future__ import annotations
