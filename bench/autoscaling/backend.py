"""A simulated backend: replicas that start, work and leave, and the requests that wait for them.

Why a simulation: the same hours of load must meet every policy, request for request, and in seconds. It is exact for
what it models: requests begin in the order in which they came, at the moment a place in a replica is free.
"""

from __future__ import annotations

import heapq
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.autoscaling.traces import Trace

START_S: Final = 3.0
"""From the decision until a new replica takes requests."""
ONGOING_MAX: Final = 5
"""Requests that a replica works on at once (``max_ongoing_requests``)."""
LONG_WAIT_S: Final = 1.0


class Backend:
    """Replicas and their common queue. Time only moves forward, in `advance`."""

    def __init__(self, trace: Trace, num_replicas: int) -> None:
        self.now = 0.0
        self.target = num_replicas
        self.num_running = num_replicas
        self.replica_seconds = 0.0
        """Of all that were decided on, those that start included: they take their room already."""
        self.most = num_replicas
        self.moves: list[tuple[float, int]] = []
        """When the number was changed, and by how many."""
        self.waits: list[float] = []
        """Of every request that has begun, how long it waited."""
        self._arrivals = trace.arrivals.tolist()
        self._services = trace.services.tolist()
        self._arrived_sums = np.concatenate([[0.0], np.cumsum(trace.arrivals)])
        self._arrivals_array: NDArray[np.float64] = trace.arrivals
        self._begun = 0
        self._begun_sum = 0.0
        self._ended = 0
        self._ended_sum = 0.0
        self._busy: list[float] = []
        """When each request that is worked on ends; a heap."""
        self._starting: list[float] = []
        """When each replica that starts will run; a heap."""

    def scale(self, target: int) -> None:
        """Have ``target`` replicas: more take `START_S`, fewer take no further request at once."""
        change = target - self.target
        if not change:
            return
        self.moves.append((self.now, change))
        self.target = target
        self.most = max(self.most, target)
        while len(self._starting) + self.num_running < target:
            heapq.heappush(self._starting, self.now + START_S)
        while self._starting and len(self._starting) + self.num_running > target:
            self._starting.remove(max(self._starting))
        self.num_running = min(self.num_running, target)

    def advance(self, until: float) -> None:
        """Let everything happen up to ``until``."""
        while self._starting and self._starting[0] <= until:
            self._work(heapq.heappop(self._starting))
            self.num_running += 1
        self._work(until)

    def _work(self, until: float) -> None:
        places = self.num_running * ONGOING_MAX
        busy, arrivals, services, begun = self._busy, self._arrivals, self._services, self._begun
        earliest, count = self.now, len(arrivals)
        while places and begun < count:
            begins_at = max(arrivals[begun], earliest)
            if begins_at >= until:
                break
            while busy and (busy[0] <= begins_at or len(busy) >= places):
                if busy[0] >= until:
                    break
                ended_at = heapq.heappop(busy)
                self._ended += 1
                self._ended_sum += ended_at
                begins_at = max(begins_at, ended_at)
            if len(busy) >= places:
                break
            earliest = begins_at
            heapq.heappush(busy, begins_at + services[begun])
            self.waits.append(begins_at - arrivals[begun])
            self._begun_sum += begins_at
            begun += 1
        while busy and busy[0] <= until:
            self._ended_sum += heapq.heappop(busy)
            self._ended += 1
        self._begun = begun
        self.replica_seconds += self.target * (until - self.now)
        self.now = until

    def counters(self) -> Counters:
        """What a scrape finds now."""
        arrived = int(np.searchsorted(self._arrivals_array, self.now, side="left"))
        arrived = max(arrived, self._begun)
        waited = arrived * self.now - float(self._arrived_sums[arrived])
        begun = self._begun * self.now - self._begun_sum
        ended = self._ended * self.now - self._ended_sum
        return Counters(
            at=self.now,
            queued_s=waited - begun,
            ongoing_s=begun - ended,
            queued=arrived - self._begun,
            ongoing=self._begun - self._ended,
        )


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """The two integrals that the load is measured with, and the gauges of the same moment."""

    at: float
    queued_s: float
    ongoing_s: float
    queued: int
    ongoing: int
