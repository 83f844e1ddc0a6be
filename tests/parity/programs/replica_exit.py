import os, requests, time
from ray import serve


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1})
class A:
    def __call__(self, request=None):
        return str(os.getpid())

    def die(self):
        os._exit(1)


h = serve.run(A.bind())
pids = {requests.get("http://127.0.0.1:8000/").text for _ in range(30)}
print(len(pids))
try:
    h.die.remote().result()
except Exception as e:
    print("died")
t = time.time()
while time.time() - t < 30:
    new = {requests.get("http://127.0.0.1:8000/").text for _ in range(30)}
    if len(new) == 2 and new != pids:
        break
    time.sleep(0.3)
print(len(new), new != pids)
