"""The command line: what a person types, and what scripts read."""

from __future__ import annotations
