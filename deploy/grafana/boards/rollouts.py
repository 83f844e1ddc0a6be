"""What a rollout has shown of a new version, where it is, and how it ended."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Board, Kind, Panel, Query, Row, Step
from deploy.grafana.boards.promql import OF_BACKEND


def _newest(name: str, by: str, *matchers: str) -> str:
    return f"max by ({by}) ({name}{{{', '.join((OF_BACKEND, *matchers))}}})"


def _compared(outcome: str) -> str:
    return (
        f'rate(serve_proxy_compared_responses_total{{{OF_BACKEND}, outcome=~"{outcome}"}}[$__rate_interval])'
    )


_WHERE: Final = Row(
    title="Where it is",
    panels=(
        Panel(
            title="Step",
            description="Of each rollout under way. In words, with what is missing: `muster rollout watch NAME`.",
            unit="none",
            width=8,
            steps_between=True,
            queries=(
                Query(expr=_newest("serve_rollout_step", "backend_tag"), legend="{{backend_tag}}"),
                Query(expr=_newest("serve_rollout_steps", "backend_tag"), legend="{{backend_tag}} last"),
            ),
        ),
        Panel(
            title="Share of the requests",
            description="What the new version gets. Copies (shadow steps) do not count.",
            unit="percentunit",
            width=8,
            steps_between=True,
            queries=(
                Query(expr=_newest("serve_rollout_traffic_share", "backend_tag"), legend="{{backend_tag}}"),
            ),
        ),
        Panel(
            title="Time in the step",
            description="Long with little traffic: a step ends when its requests have shown enough.",
            unit="s",
            width=8,
            queries=(
                Query(expr=_newest("serve_rollout_step_seconds", "backend_tag"), legend="{{backend_tag}}"),
            ),
        ),
    ),
)

_SHOWN: Final = Row(
    title="What its requests have shown",
    panels=(
        Panel(
            title="Gates",
            description="unknown: neither that it is worse than its baseline, nor that it is no worse than the limits "
            "allow. A step passes when all gates have, and one that failed aborts the rollout.",
            unit="none",
            kind=Kind.STATES,
            width=18,
            texts=(("1", " "),),
            queries=(
                Query(
                    expr=f"{_newest('serve_rollout_gate', 'backend_tag, gate, status')} == 1",
                    legend="{{backend_tag}} {{gate}} {{status}}",
                ),
            ),
        ),
        Panel(
            title="Paused",
            description="By `muster rollout pause`: it stays at its step, and is still aborted where it is worse.",
            unit="none",
            kind=Kind.NUMBER,
            width=6,
            steps=(Step(value=None, color="green"), Step(value=1, color="orange")),
            texts=common.NO_OR_YES,
            queries=(Query(expr=_newest("serve_rollout_paused", "backend_tag"), legend="{{backend_tag}}"),),
        ),
        Panel(
            title="Requests compared",
            description="In the present step, of the new version and of its baseline.",
            unit="none",
            width=12,
            queries=(
                Query(
                    expr=_newest("serve_rollout_compared_requests", "backend_tag, version", 'gate="errors"'),
                    legend="{{backend_tag}} {{version}}",
                ),
            ),
        ),
        Panel(
            title="Bad ones among them",
            description="Share that failed, was refused as wrong, or took longer than the gate's time.",
            unit="percentunit",
            width=12,
            queries=(
                Query(
                    expr=f"{_newest('serve_rollout_bad_requests', 'backend_tag, gate, version')} / "
                    f"({_newest('serve_rollout_compared_requests', 'backend_tag, gate, version')} > 0)",
                    legend="{{backend_tag}} {{gate}} {{version}}",
                ),
            ),
        ),
    ),
)

_DIFFERENCES: Final = Row(
    title="How its answers differ",
    panels=(
        Panel(
            title="Different answers",
            description="In shadow steps: share of the compared answers to copies that differ from what callers got, "
            "beyond what is known to vary. Where they differ: `muster rollout watch NAME`.",
            unit="percentunit",
            width=12,
            queries=(
                Query(
                    expr=f"sum by (backend_tag) ({_compared('different')}) / "
                    f"(sum by (backend_tag) ({_compared('.*')}) > 0)",
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Answers compared",
            description="A proxy compares up to 50 requests a second.",
            unit="reqps",
            width=12,
            queries=(Query(expr=f"sum by (backend_tag) ({_compared('.*')})", legend="{{backend_tag}}"),),
        ),
    ),
)

_ENDS: Final = Row(
    title="How they ended",
    panels=(
        Panel(
            title="Last decided",
            description="How long ago the last rollout was decided, and how. Why: `muster rollout list`.",
            unit="s",
            kind=Kind.NUMBER,
            queries=(
                Query(
                    expr=f"time() - {_newest('serve_rollout_decided_timestamp_seconds', 'backend_tag, outcome')}",
                    legend="{{backend_tag}} {{outcome}}",
                ),
            ),
        ),
    ),
)

BOARD: Final = Board(
    uid=common.ROLLOUTS,
    title="Muster: Rollouts",
    description="Where rollouts are, what requests have shown of new versions, and how they ended.",
    variables=(common.BACKENDS,),
    annotations=(common.DEPLOYS, common.SCALINGS_OF_BACKEND, common.LEADER_CHANGES),
    rows=(_WHERE, _SHOWN, _DIFFERENCES, _ENDS),
)
