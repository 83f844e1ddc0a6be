"""The outside: one file for each thing that the controller touches."""

from __future__ import annotations
