"""The outside: the file of people, and connections to NATS."""

from __future__ import annotations
