"""Ray objects as arguments of calls: their values travel. And values of responses as Ray objects.

Why not the references: the replica may run in another Ray, where they mean nothing.
"""

from __future__ import annotations

import sys
from typing import Any, Final, final

from muster.handles.calls import CallOutcome
from muster.handles.pickles import pickle_value, to_replica_error
from muster.handles.wakeups import Waker, Wakers
from serve_common.errors import ServeError


@final
class ObjectRefSource:
    """The value of a Ray object, once it is there; an argument as the response of another call is."""

    __slots__ = ("_wakers", "outcome")

    def __init__(self, ref: Any) -> None:
        """``ref`` is a ``ray.ObjectRef`` of this process' Ray."""
        self._wakers: Final = Wakers()
        self.outcome: CallOutcome | None = None
        ref.future().add_done_callback(self._on_done)  # on a thread of Ray's

    def add_done_waker(self, waker: Waker) -> None:
        """As `HandleCall.add_done_waker`."""
        self._wakers.add(waker)
        if self.outcome is not None:
            waker()

    def _on_done(self, future: Any) -> None:
        try:
            self.outcome = CallOutcome(body=pickle_value(future.result()))
        except ServeError as error:
            self.outcome = CallOutcome(failure=error)
        except BaseException as error:  # noqa: BLE001 - what the task raised, or that its value cannot be pickled
            cause = getattr(error, "cause", None)
            raised = cause if isinstance(cause, Exception) else error
            self.outcome = CallOutcome(failure=to_replica_error(error, raised))
        self._wakers.wake()


def is_object_ref(value: Any) -> bool:
    """Whether ``value`` is a ``ray.ObjectRef``; Ray is not imported for it."""
    kind = type(value)
    return kind.__name__ == "ObjectRef" and kind.__module__.partition(".")[0] == "ray"


def put_in_ray(value: Any) -> Any:
    """A ``ray.ObjectRef`` of ``value``. Raises RuntimeError where this process uses no Ray: none is started for it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise RuntimeError(
            "an ObjectRef needs Ray, which this process does not use, as in local testing mode: await the response"
        )
    return ray.put(value)
