"""`muster replay`: captured requests against a new version, with the differences that are no noise."""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec
import typer

from muster.cli.captures import EndpointName, LimitOption
from muster.cli.output import Cell, Progress, print_json, print_line, print_table, table
from muster.cli.queries import stack_command
from muster.cli.session import ExitCode, Session, StackChoice
from muster.client.admin import Stack
from muster.client.replay import Replay, ReplayTarget
from muster.client.replay_target import (
    VersionTarget,
    find_endpoint,
    find_target,
    get_main_backend,
    send_to,
)
from serve_common.api.queries import GetAllEndpoints
from serve_common.errors import BadField, NotFound, ServeError
from serve_common.names import EndpointTag, short_name
from serve_common.protocol.captures import CapturedPair
from serve_common.replay.captured_requests import can_replay
from serve_common.replay.comparison import Comparison, ComparisonResult, PathResult, PathStatus
from serve_common.replay.differences import ReplayedResponse, ResponseComparator
from serve_common.values import check_between

_CONCURRENCY_MAX = 64
_STYLES = {PathStatus.DIFFERENT: "red", PathStatus.UNKNOWN: "yellow", PathStatus.NOISE: ""}


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay did and found."""

    endpoint_tag: str
    old: str
    """Tag of the old version's backend."""
    new: str
    """Tag of the new version's backend."""
    skipped: int
    """Captured requests that were not sent: without their body, or of a method that changes something."""
    result: ComparisonResult


@stack_command
def replay(
    session: Session,
    choice: StackChoice,
    *,
    name: EndpointName,
    against: Annotated[
        str,
        typer.Option("--against", metavar="NAME", help="Backend or deployment that runs the new version."),
    ],
    old: Annotated[
        str | None,
        typer.Option(
            "--old",
            metavar="NAME",
            help="Backend or deployment that runs the old version. Default: the deployment itself.",
        ),
    ] = None,
    limit: LimitOption = 1_000,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="NUMBER",
            help="Numbers that differ by no more than this, or by this share of the larger one, are equal, unless both "
            "are integers.",
        ),
    ] = 1e-6,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="JSON_PATH",
            help="Leave out a path with all below it, such as '$.host', or status, content-type or body; may be "
            "repeated.",
        ),
    ] = None,
    unsafe: Annotated[
        bool,
        typer.Option(
            "--unsafe",
            help="Send requests of all methods again, not only GET, HEAD and OPTIONS: each runs at least twice in the "
            "old version, and once in the new one.",
        ),
    ] = False,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", metavar="N", min=1, max=_CONCURRENCY_MAX, help="Requests to replay at a time."
        ),
    ] = 4,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", metavar="SECONDS", min=0.1, max=3600.0, help="Seconds to wait for each response."
        ),
    ] = 60.0,
    as_json: bool = False,
) -> None:
    """Replay captured requests against a new version, and print where its responses differ.

    Examples:
      muster replay hello --against hello-v2
      muster replay hello --against hello-v2 --unsafe --ignore '$.host' --json

    Each request goes to the old version, to the old version again, and to the new one. What differs between the first
    two is noise, such as ids and timestamps. A difference is reported once so many requests show it that an equal
    version would be accused in one of a thousand replays. The exit code is 1 where there is a difference.
    """
    with session.reporting(as_json=as_json):
        check_between(tolerance, 0, 1, "--tolerance")
        comparison = Comparison(ResponseComparator(tolerance, ignore or ()))

        async def run(stack: Stack, progress: Progress) -> ReplayReport:
            endpoints = await stack.admin.call(GetAllEndpoints())
            captured = find_endpoint(endpoints, name)
            targets = {
                ReplayTarget.OLD: find_target(
                    endpoints, captured, old or get_main_backend(captured), "--old"
                ),
                ReplayTarget.NEW: find_target(endpoints, captured, against, "--against"),
            }
            if targets[ReplayTarget.OLD] == targets[ReplayTarget.NEW]:
                raise BadField("--against", "is the old version itself")
            assert stack.captures is not None
            pairs = await stack.captures(EndpointTag(captured.endpoint_tag)).read(limit)
            chosen = [pair for pair in pairs if can_replay(pair, is_unsafe=unsafe)]
            if not chosen:
                raise NotFound(_nothing_to_replay(captured.endpoint_tag, len(pairs)))
            await _replay(stack, chosen, targets, comparison, progress, concurrency, timeout_s)
            return ReplayReport(
                endpoint_tag=captured.endpoint_tag,
                old=targets[ReplayTarget.OLD].backend_tag,
                new=targets[ReplayTarget.NEW].backend_tag,
                skipped=len(pairs) - len(chosen),
                result=comparison.result(),
            )

        report = session.run(session.find_stack(choice), "replay", run)
        if as_json:
            print_json(report)
        else:
            _show(report)
        if report.result.status is PathStatus.DIFFERENT:
            raise typer.Exit(ExitCode.FAILED)


async def _replay(  # noqa: PLR0917 - the parts of one replay
    stack: Stack,
    pairs: list[CapturedPair],
    targets: dict[ReplayTarget, VersionTarget],
    comparison: Comparison,
    progress: Progress,
    concurrency: int,
    timeout_s: float,
) -> None:
    async def send(pair: CapturedPair, target: ReplayTarget) -> ReplayedResponse:
        return await send_to(stack.caller, pair, targets[target], timeout_s)

    steps = max(1, len(pairs) // 4)

    def on_progress(done: int) -> None:
        if done % steps == 0:
            progress.show(f"{done} of {len(pairs)} requests compared")

    work = Replay(
        send,
        comparison,
        rng=lambda: secrets.randbelow(2**20) / 2**20,
        concurrency=concurrency,
        on_progress=on_progress,
    )
    try:
        await work.run(pairs)
    except ExceptionGroup as group:
        errors = group.subgroup(ServeError)
        raise (errors or group).exceptions[0] from group


def _nothing_to_replay(tag: str, captured: int) -> str:
    name = short_name(tag)
    if not captured:
        return f"nothing was captured of {name}; 'muster capture set {name} 1% --bodies' starts it"
    return (
        f"none of {captured} captured requests of {name} can be sent again: their bodies were not captured "
        "('muster capture set --bodies'), or their methods change something (--unsafe sends them all the same)"
    )


def _show(report: ReplayReport) -> None:
    result = report.result
    rows = table("path", "what", "status", "differs", "noise", "old", "new", "request")
    for one in result.paths:
        rows.add_row(
            Cell(one.path),
            Cell(one.kind.value),
            Cell(_describe_status(one), style=_STYLES[one.status]),
            Cell(f"{one.differing} of {result.requests}"),
            Cell(f"{one.noisy} of {result.requests}"),
            Cell(one.example.old),
            Cell(one.example.new),
            Cell(one.request_id),
        )
    old, new = short_name(report.old), short_name(report.new)
    print_table(f"{old} against {new}", rows)
    print_line(_summarize(report))


def _describe_status(one: PathResult) -> str:
    if one.requests_needed is None:
        return one.status.value
    return f"unknown (about {one.requests_needed} more)"


def _summarize(report: ReplayReport) -> str:
    result = report.result
    compared = f"{result.requests:,} requests compared"
    if report.skipped:
        compared += f", {report.skipped:,} skipped (no body, or a method that needs --unsafe)"
    if result.status is PathStatus.DIFFERENT:
        paths = sorted({one.path for one in result.paths if one.status is PathStatus.DIFFERENT})
        return f"{compared}: the new version differs at {', '.join(paths)}"
    bound = f"what always differs is in less than {result.share_max:.2%} of such requests"
    if result.status is PathStatus.UNKNOWN:
        return f"{compared}: too few to tell whether the new version differs"
    return f"{compared}: no difference but noise; {bound}, but for a probability of 0.1%"
