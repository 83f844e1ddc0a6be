"""The proxy's adapters: one file per external system."""

from __future__ import annotations
