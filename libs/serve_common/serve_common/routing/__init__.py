"""Routing decisions that proxies and handles share; pure.

Why pure: what routes requests must be testable for every order of events, so time comes in as ``now`` (seconds, any
monotonic clock) and random numbers as a `Rng`. Nothing here awaits, sends or reads a clock.
"""

from __future__ import annotations
