import requests
import starlette
from ray import serve
from ray.serve.handle import DeploymentHandle


@serve.deployment
class ModelInferencer:
    def __init__(self):
        self.loads = []

    @serve.multiplexed(max_num_models_per_replica=2)
    async def get_model(self, model_id: str):
        self.loads.append(model_id)
        return lambda x: f"{model_id}:{x}"

    async def __call__(self, request: starlette.requests.Request):
        model_id = serve.get_multiplexed_model_id()
        model = await self.get_model(model_id)
        return model("http")

    async def predict(self, x):
        model = await self.get_model(serve.get_multiplexed_model_id())
        return model(x)

    def loaded(self):
        return self.loads


handle = serve.run(ModelInferencer.bind())
resp = requests.get(url="http://localhost:8000", headers={"serve_multiplexed_model_id": str("1")})
print(resp.text)
print(handle.options(multiplexed_model_id="2").predict.remote("a").result())
print(handle.options(method_name="predict", multiplexed_model_id="1").remote("b").result())
print(handle.options(multiplexed_model_id="3").predict.remote("c").result())
print(handle.options(multiplexed_model_id="2").predict.remote("d").result())
print(handle.loaded.remote().result())
r = requests.get("http://localhost:8000")
print(r.status_code)
