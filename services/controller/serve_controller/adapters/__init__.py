"""Adapters: one file for each external system that the controller uses."""

from __future__ import annotations
