import requests, starlette
from typing import Dict
from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class Adder:
    def __init__(self, increment: int):
        self.increment = increment

    def add(self, inp: int) -> int:
        return self.increment + inp


@serve.deployment
class Combiner:
    def average(self, *inputs) -> float:
        return sum(inputs) / len(inputs)


@serve.deployment
class Ingress:
    def __init__(self, adder1: DeploymentHandle, adder2: DeploymentHandle, combiner: DeploymentHandle):
        self._a1 = adder1
        self._a2 = adder2
        self._c = combiner

    async def __call__(self, request: starlette.requests.Request) -> Dict[str, float]:
        input_json = await request.json()
        r1 = self._a1.add.remote(input_json["val"])
        r2 = self._a2.add.remote(input_json["val"])
        final = self._c.average.remote(r1, r2)
        return {"result": await final}


app = Ingress.bind(Adder.bind(increment=1), Adder.bind(increment=2), Combiner.bind())
h = serve.run(app)
print(requests.post("http://localhost:8000/", json={"val": 100.0}).json())
st = serve.status()
print(sorted(st.applications["default"].deployments))
print(st.applications["default"].status == "RUNNING", repr(st.applications["default"].status))
for n, d in sorted(st.applications["default"].deployments.items()):
    print(n, d.status, d.status_trigger, d.replica_states, repr(d.message))
print(st.proxies and list(st.proxies.values())[0])
serve.shutdown()
