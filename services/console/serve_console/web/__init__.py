"""The pages, a module for each."""

from __future__ import annotations
