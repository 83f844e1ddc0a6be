import dataclasses

from ray import serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ProxyStatus,
    ReplicaState,
    ServeStatus,
)

for enum in (ApplicationStatus, DeploymentStatus, ProxyStatus, ReplicaState):
    print(enum.__name__, sorted(member.value for member in enum))
print(
    issubclass(ApplicationStatus, str),
    ApplicationStatus.RUNNING == "RUNNING",
    ApplicationStatus("RUNNING").name,
)
for cls in (ServeStatus, ApplicationStatusOverview, DeploymentStatusOverview):
    print(cls.__name__, [f.name for f in dataclasses.fields(cls)])


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0})
class A:
    def __call__(self):
        return 1


empty = serve.status()
print(type(empty).__name__, empty.target_capacity)
serve.run(A.bind(), name="one", route_prefix="/one")
s = serve.status()
app = s.applications["one"]
print(
    isinstance(s, ServeStatus),
    isinstance(app, ApplicationStatusOverview),
    app.status,
    app.status.value,
    repr(app.message),
)
print(app.last_deployed_time_s > 1e9)
d = app.deployments["A"]
print(type(d).__name__, d.status, d.status_trigger, d.replica_states, repr(d.message))
print(d.status_trigger in list(DeploymentStatusTrigger), d.status == DeploymentStatus.HEALTHY)
print(
    {name: a.status.value for name, a in s.applications.items()},
    all(p == ProxyStatus.HEALTHY for p in s.proxies.values()),
)
print(sorted(dataclasses.asdict(app)), "unknown" in s.applications)
serve.delete("one")
print(serve.status().applications)
