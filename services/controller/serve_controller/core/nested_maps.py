"""Persistent maps within a persistent map.

Why here: what is empty must not stay, or two checkpoints of the same objects would differ.
"""

from __future__ import annotations

from typing import Any, TypeVar

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")


def put_in(outer: Map[Any, Map[K, V]], name: Any, key: K, value: V) -> Map[Any, Map[K, V]]:
    """``outer`` with ``key`` in the inner map of that name."""
    return outer.set(name, outer.get(name, Map()).set(key, value))


def delete_in(outer: Map[Any, Map[K, V]], name: Any, key: K) -> Map[Any, Map[K, V]]:
    """``outer`` without ``key`` in the inner map of that name; an empty inner map is not kept."""
    inner = outer.get(name)
    if inner is None or key not in inner:
        return outer
    inner = inner.delete(key)
    return outer.set(name, inner) if inner else outer.delete(name)
