"""Compares the responses to copies with the one that the caller got, in shadow steps of rollouts.

Why so careful: no caller waits for a comparison, and none may pay for it. Comparisons are limited in number, rate and
memory, they happen after the response was sent, large ones in a thread, and with pauses that leave most of a core to
requests. What is too much is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Final, final

import structlog

from serve_common.clock import TokenBucket
from serve_common.dispatch.calls import Call, RequestSpec, Response
from serve_common.names import BackendTag
from serve_common.protocol.frames import RequestKind
from serve_common.protocol.snapshots import ShadowComparison
from serve_common.replay.differences import ReplayedResponse
from serve_common.replay.varying_paths import ComparedResponses, VaryingPaths
from serve_common.routing.replica_choice import Rng
from serve_common.routing.request_counts import RequestCounter
from serve_common.routing.router import Router
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.log_lines import RateLimitedLogger

_log = structlog.get_logger(__name__)

COMPARISONS_PER_S_MAX: Final = 50
"""Compared requests a second of this process."""
COMPARED_BODY_BYTES_MAX: Final = 256 * 1024
"""Responses with larger bodies are not compared."""
PENDING_MAX: Final = 64
"""Compared requests whose responses are awaited, or are yet to be compared."""
PENDING_BYTES_MAX: Final = 8 * 1024 * 1024
"""Body bytes of those."""
THREAD_BYTES_MIN: Final = 16 * 1024
"""Bodies from which on a comparison is left to a thread."""
CPU_SHARE_MAX: Final = 0.1
"""Share of a core that comparisons take at most."""


@final
class PendingComparison:
    """A request whose three responses are to be compared; dropped as soon as one of them cannot be."""

    __slots__ = ("_caller", "_copies", "_owner", "_rule", "body_bytes", "deadline")

    def __init__(self, owner: ResponseComparisons, deadline: float) -> None:
        self.deadline: Final = deadline
        self.body_bytes = 0
        """Size of the bodies that it has in memory."""
        self._owner = owner
        self._rule: ShadowComparison | None = None
        """Set by the caller's response."""
        self._caller: ReplayedResponse | None = None
        self._copies: dict[BackendTag, ReplayedResponse | None] = {}

    def add_response(self, call: Call, response: Response) -> None:
        """The caller's response. It is only compared if it comes from the deployment that is rolled out."""
        for rule in {id(rule): rule for rule in call.spec.endpoint.comparisons.values()}.values():
            counter = self._owner.get_counter(rule.own)
            if counter is not None and counter is call.judged_by:
                self._rule = rule
        self._caller = read_response(response)
        if self._rule is None or self._caller is None:
            self.drop()
        elif self._owner.reserve(self, self._caller):
            self._check()

    def add_copy(self, backend_tag: BackendTag, response: ReplayedResponse | None) -> None:
        """What came of a copy; None where there is nothing to compare."""
        self._copies[backend_tag] = response
        if response is None or self._owner.reserve(self, response):
            self._check()

    def drop(self) -> None:
        """Compare nothing; may be called more than once."""
        self._owner.remove(self)

    def _check(self) -> None:
        rule = self._rule
        if rule is None or self._caller is None:
            return
        tags = (rule.canary, rule.baseline)
        if any(tag in self._copies and self._copies[tag] is None for tag in tags):
            self.drop()
        elif all(tag in self._copies for tag in tags):
            self._owner.add_ready(self)

    def take(self) -> tuple[ShadowComparison, ReplayedResponse, ReplayedResponse, ReplayedResponse]:
        """What is compared, once all of it is there: the rule, and responses of caller, canary and baseline."""
        rule, caller = self._rule, self._caller
        assert rule is not None
        assert caller is not None
        canary, baseline = self._copies[rule.canary], self._copies[rule.baseline]
        assert canary is not None
        assert baseline is not None
        return rule, caller, canary, baseline


@final
class _RolloutState:
    """What was learned in one rollout."""

    __slots__ = ("counter", "examples", "paths", "rule")

    def __init__(self, counter: RequestCounter, rule: ShadowComparison) -> None:
        self.counter = counter
        """The canary's: another one is another rollout."""
        self.rule = rule
        self.paths = VaryingPaths(rule.tolerance, rule.ignored_paths)
        """A thread may be using it."""
        self.examples: list[str] = []


@final
class ResponseComparisons:
    """All comparisons of one process; its methods run on the loop."""

    def __init__(self, routers: Mapping[BackendTag, Router], now: Rng) -> None:
        """``now`` reads the loop's clock."""
        self._routers = routers
        self._now = now
        self._rate = TokenBucket(COMPARISONS_PER_S_MAX, COMPARISONS_PER_S_MAX)
        self._pending: set[PendingComparison] = set()
        self._pending_bytes = 0
        self._ready: deque[PendingComparison] = deque()
        self._wake = asyncio.Event()
        self._states: dict[BackendTag, _RolloutState] = {}
        self._tasks = TaskOwner("response_comparisons")
        self._failures = RateLimitedLogger(_log.warning)

    def __len__(self) -> int:
        """Number of requests that are being compared."""
        return len(self._pending)

    def start(self) -> None:
        """Start comparing."""
        self._tasks.start(self._run(), name="compare")

    async def close(self, timeout_s: float) -> None:
        """Compare nothing more."""
        for pending in list(self._pending):
            self.remove(pending)
        await self._tasks.close(timeout_s)

    def start_request(self, spec: RequestSpec) -> PendingComparison | None:
        """Start with a request that is copied; None where it is not compared, by its kind or for lack of capacity."""
        if spec.kind is not RequestKind.HTTP:
            return None
        now = self._now()
        if len(self._pending) >= PENDING_MAX:
            # A caller that left sends no response: then nothing else ends it.
            for pending in [one for one in self._pending if one.deadline < now]:
                self.remove(pending)
        is_full = len(self._pending) >= PENDING_MAX or self._pending_bytes >= PENDING_BYTES_MAX
        if is_full or not self._rate.take(now):
            return None
        pending = PendingComparison(self, spec.deadline)
        self._pending.add(pending)
        return pending

    def examples(self) -> dict[BackendTag, list[str]]:
        """By canary, texts about some paths at which its responses differ."""
        return {
            tag: state.examples
            for tag, state in self._states.items()
            if state.examples and state.counter is self.get_counter(tag)
        }

    # -- for pending comparisons --

    def get_counter(self, backend_tag: BackendTag) -> RequestCounter | None:
        """The counter of a backend that is part of a rollout."""
        router = self._routers.get(backend_tag)
        return None if router is None else router.request_counts

    def reserve(self, pending: PendingComparison, response: ReplayedResponse) -> bool:
        """Account for a body; False where there is no space for it, or ``pending`` was dropped: it then is."""
        if pending not in self._pending:
            return False
        if self._pending_bytes + len(response.body) > PENDING_BYTES_MAX:
            self.remove(pending)
            return False
        pending.body_bytes += len(response.body)
        self._pending_bytes += len(response.body)
        return True

    def remove(self, pending: PendingComparison) -> None:
        """Forget a comparison."""
        if pending in self._pending:
            self._pending.discard(pending)
            self._pending_bytes -= pending.body_bytes

    def add_ready(self, pending: PendingComparison) -> None:
        """All three responses are there."""
        if pending in self._pending:
            self._ready.append(pending)
            self._wake.set()

    # -- comparing --

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ready:
                pending = self._ready.popleft()
                try:
                    taken_s = await self._compare(pending)
                except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the comparison of others
                    taken_s = 0.0
                    self._failures.log(self._now(), "comparison_failed", error=repr(error))
                finally:
                    self.remove(pending)
                await asyncio.sleep(taken_s * (1 / CPU_SHARE_MAX - 1))

    async def _compare(self, pending: PendingComparison) -> float:
        """Compare and count; returns the seconds of CPU that this took."""
        rule, *responses = pending.take()
        canary, baseline = self.get_counter(rule.canary), self.get_counter(rule.baseline)
        if pending not in self._pending or canary is None or baseline is None:
            return 0.0
        state = self._get_state(rule, canary)
        if max(len(response.body) for response in responses) >= THREAD_BYTES_MIN:
            taken_s, compared = await asyncio.to_thread(_compare_timed, state.paths, *responses)
        else:
            taken_s, compared = _compare_timed(state.paths, *responses)
        state.examples = state.paths.examples()
        if compared is not None:
            # Both at once: reports have as many of the one as of the other.
            canary.compared += 1
            canary.different += compared.is_canary_different
            baseline.compared += 1
            baseline.different += compared.is_baseline_different
        return taken_s

    def _get_state(self, rule: ShadowComparison, counter: RequestCounter) -> _RolloutState:
        state = self._states.get(rule.canary)
        if state is None or state.counter is not counter or state.rule != rule:
            self._states = {
                tag: former
                for tag, former in self._states.items()
                if former.counter is self.get_counter(tag) and tag != rule.canary
            }
            state = self._states[rule.canary] = _RolloutState(counter, rule)
        return state


def _compare_timed(
    paths: VaryingPaths, caller: ReplayedResponse, canary: ReplayedResponse, baseline: ReplayedResponse
) -> tuple[float, ComparedResponses | None]:
    started_at = time.thread_time()
    compared = paths.compare(caller, canary, baseline)
    return time.thread_time() - started_at, compared


def read_copy(response: Response) -> ReplayedResponse:
    """A copy's response as it is compared: one in pieces, or too large, differs from any that is neither."""
    return read_response(response) or ReplayedResponse(status=response.status, content_type="(too large)")


def read_response(response: Response) -> ReplayedResponse | None:
    """A response as it is compared; None for one that comes in pieces, or is too large."""
    if response.stream is not None or response.socket is not None:
        return None
    if len(response.body) > COMPARED_BODY_BYTES_MAX:
        return None
    content_type = next((value for name, value in response.headers if name.lower() == b"content-type"), b"")
    return ReplayedResponse(
        status=response.status,
        content_type=content_type.decode("latin-1"),
        # Copied, because the buffer is the connection's.
        body=bytes(response.body),
    )
