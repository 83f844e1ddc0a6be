"""Requests on their way to replicas: what proxies and handles share, from the choice of a replica to the answer's end.

Why in the shared library: a handle inside a replica must queue, retry, eject and cancel exactly as a proxy does.
"""

from __future__ import annotations
