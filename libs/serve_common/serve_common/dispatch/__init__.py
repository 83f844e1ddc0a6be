"""Dispatch of requests to replicas, shared by proxies and handles: from the choice of a replica to the response's end.

Why in the shared library: a handle inside a replica must queue, retry, eject and cancel exactly as a proxy does.
"""

from __future__ import annotations
