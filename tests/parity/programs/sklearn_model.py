import requests, numpy as np
from sklearn.linear_model import LogisticRegression
from ray import serve

X = np.array([[0.0], [1.0], [2.0], [3.0]])
y = np.array([0, 0, 1, 1])
model = LogisticRegression().fit(X, y)


@serve.deployment
class Clf:
    def __init__(self, model):
        self.model = model

    async def __call__(self, request):
        x = (await request.json())["x"]
        return {"pred": self.model.predict(np.array(x)).tolist()}


serve.run(Clf.bind(model))
print(requests.post("http://127.0.0.1:8000/", json={"x": [[0.2], [2.7]]}).json())
