"""The proxy: HTTP (and plain NATS calls) in, requests to replicas out.

It holds no durable state: all routing state comes from the bucket, so any number of proxies can run, and one that
starts while no controller is running still serves.
"""

from __future__ import annotations
