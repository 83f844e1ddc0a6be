import time
import requests
from typing import Any, Dict
from ray import serve


@serve.deployment(name="A", num_replicas=1, user_config={"threshold": 0.5})
class Model:
    def __init__(self):
        self.calls = 0
        self.threshold = None

    def reconfigure(self, config: Dict[str, Any]):
        self.calls += 1
        self.threshold = config["threshold"]

    def __call__(self, request):
        return {
            "threshold": self.threshold,
            "calls": self.calls,
            "deployment": serve.get_replica_context().deployment,
        }


serve.run(Model.bind())
print(requests.get("http://localhost:8000/").json())
serve.run(Model.options(user_config={"threshold": 0.9}).bind())
print(requests.get("http://localhost:8000/").json())
print(
    Model.name,
    Model.num_replicas,
    Model.user_config,
    Model.max_ongoing_requests,
    Model.route_prefix if hasattr(Model, "route_prefix") else "no prefix",
)


@serve.deployment(user_config={"items": [1, {"nested": "x"}]})
class ListConfig:
    async def reconfigure(self, config):
        self.config = config

    def __call__(self, request):
        return self.config


serve.run(ListConfig.bind(), name="second", route_prefix="/second")
print(requests.get("http://localhost:8000/second").json())


@serve.deployment(user_config={"a": 1}, max_constructor_retry_count=1)
class NoReconfigure:
    def __call__(self, request):
        return "x"


try:
    serve.run(NoReconfigure.bind(), name="third", route_prefix="/third")
    print("deployed")
except Exception as e:
    print("refused", type(e).__name__ in ("RuntimeError", "DeployFailed"), isinstance(e, RuntimeError))
