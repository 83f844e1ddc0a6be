"""Reports to the controller what this proxy has applied, every second and at once on change.

Why at once: a goal that changes routing succeeds only when every live proxy has reported its snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Final, final

import structlog

from serve_common.errors import BusUnavailable
from serve_common.names import BackendTag, ProxyId
from serve_common.protocol.reports import JUDGED_MAX, ProxyReport, RequestCounts

_log = structlog.get_logger(__name__)

REPORT_INTERVAL_S: Final = 1.0
JUDGED_INTERVAL_S: Final = 0.5
"""Seconds between two reports while a rollout is judged by what they count. Never sooner because of a failure: where a
block of requests ends must not depend on what is in it."""
_COALESCE_S: Final = 0.01
"""Seconds for which changes are coalesced into one report."""
_SPACING_S: Final = 0.05
"""Minimum seconds between two reports: a thousand proxies must not overload a controller that makes many changes."""


SendReport = Callable[[ProxyReport], Awaitable[None]]
"""Publish a report to the controller. Raises `BusUnavailable`."""


@final
class Reports:
    """Sends this proxy's reports for as long as it runs."""

    def __init__(
        self,
        send_report: SendReport,
        proxy_id: ProxyId,
        *,
        incarnation: str,
        started_at: float,
        applied_snapshot_id: Callable[[], int],
        http_refusal: Callable[[], tuple[str, int]],
        metrics_url: Callable[[], str],
        request_counts: Callable[[], Mapping[BackendTag, RequestCounts]],
        differences: Callable[[], dict[BackendTag, list[str]]] = dict,
    ) -> None:
        """``started_at`` is when this process started, in seconds since 1970; ``incarnation`` a random id of it.

        ``http_refusal`` returns why the newest HTTP options are not in force, and their snapshot id; ``metrics_url``
        the URL where this proxy is scraped, empty while unknown; ``request_counts`` what it counts of judged backends,
        ``differences`` where responses of canaries differ.
        """
        self.address = ""
        """Address on which the proxy listens; set once it does."""
        self._send_report = send_report
        self._proxy_id = proxy_id
        self._incarnation = incarnation
        self._started_at = started_at
        self._applied_snapshot_id = applied_snapshot_id
        self._http_refusal = http_refusal
        self._metrics_url = metrics_url
        self._request_counts = request_counts
        self._differences = differences
        self._sequence = 0
        self._is_leaving = False
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Report at once: something changed, or a new controller leads."""
        self._wake.set()

    def leave(self) -> None:
        """Report from now on that this proxy accepts no new requests."""
        self._is_leaving = True
        self._wake.set()

    async def run(self) -> None:
        """Send reports until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            is_judged = await self.send()
            sent_at = loop.time()
            with contextlib.suppress(TimeoutError):  # it is time for the next
                async with asyncio.timeout(JUDGED_INTERVAL_S if is_judged else REPORT_INTERVAL_S):
                    await self._wake.wait()
                    await asyncio.sleep(max(_COALESCE_S, sent_at + _SPACING_S - loop.time()))

    async def send(self) -> bool:
        """Send one report; a failure is logged, and the next report replaces it. True when it has request_counts."""
        self._wake.clear()
        self._sequence += 1
        http_error, http_error_snapshot_id = self._http_refusal()
        request_counts = dict(islice(self._request_counts().items(), JUDGED_MAX))
        report = ProxyReport(
            proxy_id=self._proxy_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            started_at=self._started_at,
            applied_snapshot_id=self._applied_snapshot_id(),
            address=self.address,
            http_error=http_error,
            http_error_snapshot_id=http_error_snapshot_id,
            metrics_url=self._metrics_url(),
            leaving=self._is_leaving,
            request_counts=request_counts,
            differences=self._differences() if request_counts else {},
        )
        try:
            await self._send_report(report)
        except BusUnavailable as error:
            _log.debug("report_not_sent", reason=str(error))
        return bool(request_counts)
