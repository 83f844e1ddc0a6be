"""Evaluates for the controller, in the replica's process: a program's autoscaling policy, and its recorded stats.

A policy runs on a loop of its own, beside the requests and not on the user's: it may start tasks, which go on between
its calls. A call that hangs is left alone: until it returns, others like it fail at once.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, final

import msgspec
import structlog

from serve_common.names import DeploymentID
from serve_common.protocol.evaluation import (
    RESULT_BYTES_MAX,
    STATS_MAX,
    Evaluation,
    EvaluationResult,
    PolicyCall,
    PolicyDecision,
)
from serve_common.runtime.policies import PolicyUnusable, check_policy, check_result, check_results
from serve_common.runtime.threads import LoopThread
from serve_replica_host.replica.telemetry.traces import user_traceback
from serve_replica_host.replica.user.code import UserCode, UserCodeUnusable, load_code

_log = structlog.get_logger(__name__)

_METHOD: Final = "record_autoscaling_stats"
_STATS_TIMEOUT_S: Final = 10.0
"""Seconds after which an async ``record_autoscaling_stats`` is cancelled, as in Ray Serve."""
_NAME_LENGTH_MAX: Final = 128
_CLOSE_TIMEOUT_S: Final = 1.0

Submit = Callable[[Coroutine[Any, Any, Any]], "concurrent.futures.Future[Any]"]
"""Runs a coroutine on the user's loop."""


@final
class Evaluations:
    """Evaluations of one replica; may be called from any thread but the user's loop."""

    def __init__(self, code: UserCode, submit: Submit) -> None:
        self._code = code
        self._submit = submit
        self._has_stats = callable(getattr(code.target, _METHOD, None))
        self._policy: tuple[tuple[str, bytes], Callable[..., object]] | None = None
        """The last policy by its digest and arguments; an instance of a class keeps its memory."""
        self._policy_loop: LoopThread | None = None
        """Started with the first policy."""
        self._running = {"policy": threading.Lock(), _METHOD: threading.Lock()}

    def evaluate(self, evaluation: Evaluation) -> EvaluationResult:
        """What came of ``evaluation``; errors are part of the result."""
        call = evaluation.policy
        name = _METHOD if call is None else "policy"
        lock = self._running[name]
        if not lock.acquire(blocking=False):
            return EvaluationResult(error=f"the last call of its {name} has not returned")
        try:
            result = self._record() if call is None else self._decide(call)
        except (PolicyUnusable, UserCodeUnusable) as error:
            return EvaluationResult(error=str(error))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            if call is None:
                _log.exception("record_autoscaling_stats_failed", exc_info=error)
            return EvaluationResult(error=user_traceback(error))
        finally:
            lock.release()
        size = len(msgspec.msgpack.encode(result))
        if size > RESULT_BYTES_MAX:
            return EvaluationResult(
                error=f"the {name} returned {size:,} bytes; {RESULT_BYTES_MAX:,} can be sent"
            )
        return result

    def _decide(self, call: PolicyCall) -> EvaluationResult:
        key = call.digest, msgspec.msgpack.encode(call.kwargs)
        if self._policy is None or self._policy[0] != key:
            target, _, _ = load_code(call.code, call.digest)
            made = self._on_policy_loop(target, **call.kwargs) if inspect.isclass(target) else target
            self._policy = key, check_policy(made, call.name)
        if call.application is not None:
            contexts = {
                DeploymentID(context.deployment_name, context.app_name): context
                for context in call.application
            }
            found = check_results(call.name, self._on_policy_loop(self._policy[1], contexts), contexts)
            return EvaluationResult(
                decisions={
                    deployment.name: PolicyDecision(num_replicas=number, policy_state=state)
                    for deployment, (number, state) in found.items()
                }
            )
        number, state = check_result(call.name, self._on_policy_loop(self._policy[1], call.context))
        return EvaluationResult(num_replicas=number, policy_state=state)

    def _on_policy_loop(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            return function(*args, **kwargs)

        if self._policy_loop is None:
            self._policy_loop = LoopThread("policy")
        return self._policy_loop.submit(call()).result()

    def close(self) -> None:
        """End the loop of policies; one that is stuck in a policy is left behind."""
        if self._policy_loop is not None:
            self._policy_loop.stop(_CLOSE_TIMEOUT_S)

    async def _call_method(self) -> Any:
        """On the user's loop, as health checks: while requests take all threads, that is what is to be known."""
        result = self._code.target.record_autoscaling_stats()
        return await result if inspect.isawaitable(result) else result

    def _record(self) -> EvaluationResult:
        if not self._has_stats:
            return EvaluationResult()
        future = self._submit(self._call_method())
        try:
            returned = future.result(_STATS_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise PolicyUnusable(f"{_METHOD} took more than {_STATS_TIMEOUT_S:g} s") from None
        return EvaluationResult(stats=_check_stats(returned))


def _check_stats(returned: Any) -> dict[str, float]:
    """The values as floats. Raises `PolicyUnusable`."""
    if not isinstance(returned, dict):
        raise PolicyUnusable(f"{_METHOD} returned a {type(returned).__name__}; it must be a dict of numbers")
    if len(returned) > STATS_MAX:
        raise PolicyUnusable(f"{_METHOD} returned {len(returned)} values; at most {STATS_MAX} are recorded")
    stats = {}
    for name, value in returned.items():
        if not isinstance(name, str) or len(name) > _NAME_LENGTH_MAX:
            raise PolicyUnusable(f"{_METHOD}: names are texts of at most {_NAME_LENGTH_MAX} characters")
        if not (hasattr(value, "__float__") or hasattr(value, "__index__")) or not math.isfinite(value):
            raise PolicyUnusable(
                f"{_METHOD} returned a {type(value).__name__} for {name!r}; it must be a number"
            )
        stats[name] = float(value)
    return stats
