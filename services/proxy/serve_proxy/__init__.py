"""The proxy: HTTP (and plain NATS calls) in, requests to replicas out.

Why it holds no truth: everything it routes by comes from the bucket, so any number of proxies can run, and one that
starts while no controller lives still serves.
"""

from __future__ import annotations
