"""References to Ray's objects and actors in what is pickled: in arguments, in results, and in code that travels.

A reference means something only in the Ray that it came from. Pickled by itself it would also lose its owner, so that
its value never comes. With Ray's own reducers it keeps the owner; and where it arrives in another Ray it is an error
that says so.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from typing import Any, Final

_registered: Final[set[str]] = set()


class OtherRay(RuntimeError):
    """A reference to an object or actor of one Ray has arrived in another; the message says what to do."""


def let_references_travel() -> None:
    """Register the reducers, once Ray is there; Ray is not imported for it. Called before anything is pickled."""
    ray = sys.modules.get("ray")
    actor = sys.modules.get("ray.actor")
    if _registered or ray is None or actor is None or not hasattr(ray, "ObjectRef"):
        return
    _registered.add("ray")
    for kind in (ray.ObjectRef, actor.ActorHandle):
        copyreg.pickle(kind, _reduce)


def _reduce(reference: Any) -> Any:
    ray = sys.modules["ray"]
    if not ray.is_initialized():
        return reference.__reduce_ex__(4)
    reducers: dict[type[Any], Callable[[Any], Any]] = sys.modules["ray.cloudpickle"].CloudPickler.dispatch
    make, arguments = reducers[type(reference)](reference)[:2]
    return _restore, (_own_address(ray), type(reference).__name__, make, arguments)


def _restore(address: str, what: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    ray = sys.modules.get("ray")
    own = None if ray is None or not ray.is_initialized() else _own_address(ray)
    if own != address:
        here = "uses no Ray" if own is None else f"is in the Ray at {own}"
        raise OtherRay(
            f"an {what} of the Ray at {address} has arrived in a process that {here}: start Ray first, and the stack "
            "and the program with its RAY_ADDRESS; or send the value"
        )
    return make(*arguments)


def _own_address(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)
