"""What the stack did over time, second by second, beside what its clients felt."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import msgspec

from bench.scaling.clients import Asked
from muster.client.admin import AdminClient
from serve_common.api.queries import GetAutoscaling, GetDeploymentInfo
from serve_common.api.views import AutoscalingView

MEMORY_CHECK_PERIOD_S = 0.5


class Look(msgspec.Struct, frozen=True):
    """One look at the deployment."""

    at: float
    """The loop's time."""
    running: int
    decided: int
    seen: float | None
    wanted: float | None
    verdict: str
    why: str
    source: str


async def watch(admin: AdminClient, name: str, looks: list[Look]) -> None:
    """Look for ever."""
    loop = asyncio.get_running_loop()
    while True:
        info, scalings = await asyncio.gather(
            admin.call(GetDeploymentInfo(name=name)), admin.call(GetAutoscaling())
        )
        view = next((v for v in scalings if v.backend_tag == info.name), _NONE)
        running = sum(replica.state in ("running", "updating") for replica in info.replicas)
        looks.append(
            Look(
                at=loop.time(),
                running=running,
                decided=view.num_replicas,
                seen=view.seen,
                wanted=view.wanted,
                verdict=view.verdict,
                why=view.why,
                source=view.source,
            )
        )
        await asyncio.sleep(MEMORY_CHECK_PERIOD_S)


_NONE = AutoscalingView(backend_tag="", num_replicas=0, min_replicas=0, max_replicas=0)


def rows(looks: Sequence[Look], asked: Sequence[Asked], started_at: float, step_s: float = 1.0) -> list[str]:
    """A line for each second in which anything about the replicas changed, and one at least every ten seconds."""
    lines = [" t/s  running  decided  seen   wanted  req/s   p50/ms   p99/ms  failed  what it says"]
    last: tuple[object, ...] = ()
    last_at = float("-inf")
    for look in looks:
        now = (look.running, look.decided, look.verdict)
        if now == last and look.at - last_at < 10.0:
            continue
        last, last_at = now, look.at
        took = [a.took_s for a in asked if look.at - step_s <= a.begun_at + a.took_s < look.at]
        failed = sum(bool(a.error) for a in asked if look.at - step_s <= a.begun_at + a.took_s < look.at)
        lines.append(
            f"{look.at - started_at:4.0f}  {look.running:7d}  {look.decided:7d}  {_shown(look.seen):>5}  "
            f"{_shown(look.wanted):>6}  {len(took) / step_s:5.0f}  {_ms(took, 50):>7}  {_ms(took, 99):>7}  "
            f"{failed:6d}  {look.verdict}: {look.why}"
        )
    return lines


def percentile_ms(took_s: Sequence[float], percent: int) -> float:
    """NaN of nothing."""
    if not took_s:
        return float("nan")
    if len(took_s) == 1:
        return took_s[0] * 1000
    return statistics.quantiles(took_s, n=100, method="inclusive")[percent - 1] * 1000


def _ms(took_s: Sequence[float], percent: int) -> str:
    return f"{percentile_ms(took_s, percent):.0f}" if took_s else "-"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
