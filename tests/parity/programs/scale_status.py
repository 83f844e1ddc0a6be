import time
from ray import serve
from ray.serve.schema import ServeStatus, ApplicationStatusOverview
from ray.serve.schema import ApplicationStatus, DeploymentStatus, ReplicaState


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0})
def f():
    return 1


serve.run(f.bind(), name="app1", route_prefix=None)
s = serve.status()
print(
    type(s).__name__,
    s.applications["app1"].status == ApplicationStatus.RUNNING,
    s.applications["app1"].deployments["f"].status is DeploymentStatus.HEALTHY,
    s.applications["app1"].deployments["f"].replica_states,
    s.applications["app1"].deployments["f"].replica_states[ReplicaState.RUNNING],
)
print(
    s.target_capacity, s.applications["app1"].message == "", s.applications["app1"].last_deployed_time_s > 0
)
serve.run(f.options(num_replicas=1).bind(), name="app1", route_prefix=None)
print(serve.status().applications["app1"].deployments["f"].replica_states)
