"""What batching and multiplexing do inside of replicas: the lower half of Backend."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Panel, Query, Row
from deploy.grafana.boards.promql import OF_BACKEND, increase, mean, total

BATCHES: Final = Row(
    title="Batches",
    panels=(
        Panel(
            title="Items in a batch",
            description="Near 1: requests come too seldom, or the wait for more is too short, to gain from "
            "batching.",
            unit="none",
            queries=(
                Query(
                    expr=mean("serve_batch_size", OF_BACKEND, by="backend_tag, function"),
                    legend="{{backend_tag}} {{function}} mean",
                ),
                *common.quantiles("serve_batch_size", OF_BACKEND, by="backend_tag, function", shares=(0.95,)),
            ),
        ),
        Panel(
            title="Wait of a batch's first item",
            description="For others to come, or for the batch before to end.",
            unit="s",
            queries=common.quantiles(
                "serve_batch_wait_seconds", OF_BACKEND, by="backend_tag, function", shares=(0.5, 0.95)
            ),
        ),
        Panel(
            title="Run of a batch",
            description="How long the batch function took.",
            unit="s",
            queries=common.quantiles(
                "serve_batch_seconds", OF_BACKEND, by="backend_tag, function", shares=(0.5, 0.95)
            ),
        ),
    ),
)

MODELS: Final = Row(
    title="Multiplexed models",
    panels=(
        Panel(
            title="Loaded models",
            description="Over all replicas; one that two replicas hold counts twice.",
            unit="none",
            steps_between=True,
            queries=(
                Query(
                    expr=total("serve_multiplexed_models", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Loads and evictions",
            description="In each minute. Many evictions: more models are in use than the replicas have places "
            "for.",
            unit="none",
            queries=(
                Query(
                    expr=increase("serve_multiplexed_loads_total", OF_BACKEND, by="backend_tag, outcome"),
                    legend="{{backend_tag}} loads: {{outcome}}",
                ),
                Query(
                    expr=increase("serve_multiplexed_evictions_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} evictions",
                ),
            ),
        ),
        Panel(
            title="Time to load a model",
            description="In the user's function, without the wait for a place.",
            unit="s",
            queries=common.quantiles(
                "serve_multiplexed_load_seconds", OF_BACKEND, by="backend_tag", shares=(0.5, 0.95)
            ),
        ),
    ),
)
