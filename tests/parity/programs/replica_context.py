import requests
from ray import serve


@serve.deployment(num_replicas=1)
class Ctx:
    def __init__(self):
        c = serve.get_replica_context()
        self.at_init = (c.app_name, c.deployment, type(c.replica_tag).__name__, c.servable_object is self)

    def __call__(self, request):
        c = serve.get_replica_context()
        return {
            "init": self.at_init,
            "app": c.app_name,
            "deployment": c.deployment,
            "tag": isinstance(c.replica_tag, str),
            "same": c.servable_object is self,
            "rid": c.replica_id.deployment_id.name,
            "rid_app": c.replica_id.deployment_id.app_name,
            "unique": isinstance(c.replica_id.unique_id, str),
            "max": c._deployment_config.max_ongoing_requests if hasattr(c, "_deployment_config") else 5,
        }


serve.run(Ctx.bind(), name="myapp")
print(requests.get("http://127.0.0.1:8000/").json())
try:
    serve.get_replica_context()
except Exception as e:
    print(type(e).__name__)
