"""Two deployments as one application: the first cleans a text, and asks the second for its most frequent words.

python examples/text_pipeline.py
curl -s --data-binary @README.md http://127.0.0.1:8000/pipeline
"""

from __future__ import annotations

import collections
import re

from starlette.requests import Request

import muster as serve
from muster.handle import DeploymentHandle


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1})
class Counter:
    """Counts words."""

    def __init__(self, stop_words: set[str]) -> None:
        self.stop_words = stop_words

    def top(self, words: list[str], limit: int) -> list[tuple[str, int]]:
        """The most frequent words that are no stop words, at most ``limit``."""
        counts = collections.Counter(word for word in words if word not in self.stop_words)
        return counts.most_common(limit)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Pipeline:
    """The ingress: splits the text of the request into words."""

    def __init__(self, counter: DeploymentHandle) -> None:
        self.counter = counter

    async def __call__(self, request: Request) -> dict[str, int]:
        """The five most frequent words of the request's body."""
        text = (await request.body()).decode(errors="replace")
        words = re.findall(r"[a-z]+", text.lower())
        return dict(await self.counter.top.remote(words, limit=5))


app = Pipeline.bind(Counter.bind({"a", "and", "in", "is", "it", "of", "the", "to"}))

if __name__ == "__main__":
    serve.run(app, name="pipeline", route_prefix="/pipeline")
