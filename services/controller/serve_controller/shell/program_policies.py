"""Policies that came with a program, and what its replicas record for policies: both are evaluated in replicas.

The controller has the pickle and never loads it: it sends that and plain data to the longest-serving replica, or where
that was silent, to the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, final

import structlog

from serve_common.config.autoscaling import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from serve_common.errors import ServeError
from serve_common.names import BackendTag, ReplicaTag
from serve_common.protocol.evaluation import Evaluation, EvaluationResult, PolicyCall
from serve_controller.core.autoscaling.stats import StatsSeries, record_stats
from serve_controller.core.objects import Replica
from serve_controller.ports import PolicyFailed, PolicyResult, ReplicaEvaluator, ReplicaSilent

_log = structlog.get_logger()

TIMEOUT_S: Final = 2.0
"""Timeout of one evaluation of a policy, and of ``record_autoscaling_stats`` in all replicas of a backend, seconds."""
RETRY_S: Final = 10.0
"""Seconds for which a replica whose ``record_autoscaling_stats`` failed is not asked again."""
_REQUESTS_AT_ONCE: Final = 32
"""Most replicas of one backend whose stats are waited for at once."""
_PICKLES_MAX: Final = 64
"""Most pickles of policies in memory."""


class _BackendStats:
    """What is known of one backend."""

    def __init__(self) -> None:
        self.series: StatsSeries = {}
        self.silent_version: int | None = None
        """A code version whose class has no ``record_autoscaling_stats``."""
        self.retry_at: dict[ReplicaTag, float] = {}
        """Replicas that failed, and when they are asked again."""
        self.turn = 0
        """Number of replicas that were silent when the policy was evaluated; the next one takes its turn."""


@final
class ProgramPolicies:
    """Evaluates policies in replicas, for one term of leadership."""

    def __init__(
        self, replicas: ReplicaEvaluator, read_code: Callable[[str, int], Awaitable[tuple[bytes, int]]]
    ) -> None:
        """``read_code`` as `CodeStore.read`."""
        self._replicas = replicas
        self._read_code = read_code
        self._pickles: dict[str, bytes] = {}
        """Policies by digest, the most recently used last."""
        self._known: dict[BackendTag, _BackendStats] = {}

    def forget(self, tags: set[BackendTag]) -> None:
        """Forget all backends but these."""
        for tag in self._known.keys() - tags:
            del self._known[tag]

    async def record(
        self, tag: BackendTag, replicas: Sequence[Replica], config: AutoscalingConfig, now: float
    ) -> StatsSeries:
        """What these replicas have recorded, with what they return now; one that fails is left out."""
        known = self._known.setdefault(tag, _BackendStats())
        versions = {replica.code_version for replica in replicas}
        if versions == {known.silent_version}:
            return {}
        running = [replica.replica_tag for replica in replicas]
        known.retry_at = {
            each: at for each, at in known.retry_at.items() if at > now and each in set(running)
        }
        requested = [replica for replica in replicas if replica.replica_tag not in known.retry_at]
        slots, deadline = asyncio.Semaphore(_REQUESTS_AT_ONCE), asyncio.get_running_loop().time() + TIMEOUT_S
        results = await asyncio.gather(*(self._request(replica, slots, deadline) for replica in requested))
        stats: dict[str, dict[str, float]] = {}
        errors: list[str] = []
        for replica, result in zip(requested, results, strict=True):
            if result.error:
                errors.append(f"{replica.replica_tag}: {result.error}")
                known.retry_at[replica.replica_tag] = now + RETRY_S
            elif result.stats is not None:
                stats[replica.replica_tag] = result.stats
        if errors:
            _log.warning("stats_not_recorded", backend_tag=tag, replicas=len(errors), error=errors[0])
        if requested and not stats and not known.retry_at and len(versions) == 1:
            known.silent_version = versions.pop()
        known.series = record_stats(known.series, stats, running, config, now)
        return known.series

    async def run(
        self,
        tag: BackendTag,
        policy: AutoscalingPolicy,
        replicas: Sequence[Replica],
        context: AutoscalingContext,
    ) -> PolicyResult:
        """What the policy returns in one of ``replicas``, the oldest first. Raises `PolicyFailed`."""
        result = await self._call(tag, policy, replicas, context=context)
        return PolicyResult(num_replicas=result.num_replicas, policy_state=result.policy_state)

    async def run_application(
        self,
        policy: AutoscalingPolicy,
        replicas: Sequence[Replica],
        contexts: Mapping[BackendTag, AutoscalingContext],
    ) -> dict[BackendTag, PolicyResult]:
        """What the policy of an application returns in one of ``replicas``, for each backend that it decides on.

        Raises `PolicyFailed`.
        """
        result = await self._call(min(contexts), policy, replicas, application=list(contexts.values()))
        tags = {context.deployment_name: tag for tag, context in contexts.items()}
        decisions = result.decisions or {}
        if decisions.keys() - tags.keys():
            raise PolicyFailed("it decided on deployments that it was not asked for")
        return {
            tags[name]: PolicyResult(num_replicas=one.num_replicas, policy_state=one.policy_state)
            for name, one in decisions.items()
        }

    async def _call(
        self, tag: BackendTag, policy: AutoscalingPolicy, replicas: Sequence[Replica], **arguments: Any
    ) -> EvaluationResult:
        """``tag`` names the caller; ``arguments`` are the context, or those of an application."""
        call = PolicyCall(
            name=policy.policy_function,
            digest=policy.code,
            code=await self._read(policy.code),
            kwargs=policy.policy_kwargs,
            **arguments,
        )
        known = self._known.setdefault(tag, _BackendStats())
        if not replicas:
            raise PolicyFailed("no replica runs that could evaluate it")
        try:
            result = await self._evaluate(
                replicas[known.turn % len(replicas)], Evaluation(policy=call), TIMEOUT_S
            )
        except ReplicaSilent:
            known.turn += 1
            raise
        if result.error:
            raise PolicyFailed(result.error)
        return result

    async def _request(self, replica: Replica, slots: asyncio.Semaphore, deadline: float) -> EvaluationResult:
        async with slots:
            rest_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
            try:
                return await self._evaluate(replica, Evaluation(), rest_s)
            except PolicyFailed as error:
                return EvaluationResult(error=str(error))

    async def _evaluate(self, replica: Replica, evaluation: Evaluation, timeout_s: float) -> EvaluationResult:
        if replica.host_id is None:
            raise PolicyFailed(f"{replica.replica_tag} has no host")
        return await self._replicas.evaluate(replica.host_id, replica.replica_tag, evaluation, timeout_s)

    async def _read(self, digest: str) -> bytes:
        data = self._pickles.pop(digest, None)
        if data is None:
            try:
                data, pages = await self._read_code(digest, 0)
            except ServeError as error:
                raise PolicyFailed(f"its code cannot be read: {error}") from error
            if pages != 1:
                raise PolicyFailed("its code is larger than that of a policy may be")
        self._pickles[digest] = data
        while len(self._pickles) > _PICKLES_MAX:
            del self._pickles[next(iter(self._pickles))]
        return data
