"""Options of a stack within a program: it shares the program's Ray."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from muster.embedded.options import StackOptions, share_ray


class FakeRay:
    """Ray as far as `share_ray` knows it; remembers the thread that has started it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def is_initialized(self) -> bool:
        return self.thread is not None

    def init(self, *, namespace: str) -> None:
        assert namespace == "serve"
        self.thread = threading.current_thread()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="127.0.0.1:6379")


def test_ray_outlives_the_thread_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        options = pool.submit(share_ray, StackOptions()).result(10)
    assert options.ray_address == "127.0.0.1:6379"
    assert ray.thread is not None
    assert ray.thread.is_alive(), "Linux would end Ray's processes with it"


def test_what_prevents_ray_from_starting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]

    def fail(*, namespace: str) -> None:
        raise ConnectionError(f"no Ray for {namespace}")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConnectionError, match="no Ray for serve"):
        share_ray(StackOptions())
