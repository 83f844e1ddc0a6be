from __future__ import annotations


def up() -> None:
    """TBD"""
