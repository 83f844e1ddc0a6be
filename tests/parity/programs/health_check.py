import time, requests
from ray import serve


@serve.deployment(health_check_period_s=0.5, health_check_timeout_s=2, num_replicas=1)
class H:
    def __init__(self):
        self.ok = True
        self.t = time.time()

    def check_health(self):
        if not self.ok:
            raise RuntimeError("sick")

    def __call__(self, request=None):
        return str(self.t)

    def die(self):
        self.ok = False


h = serve.run(H.bind())
a = requests.get("http://127.0.0.1:8000/").text
h.die.remote().result()
for _ in range(100):
    time.sleep(0.3)
    r = requests.get("http://127.0.0.1:8000/")
    if r.status_code == 200 and r.text != a:
        break
print(r.status_code, r.text != a)
for _ in range(100):
    if serve.status().applications["default"].status == "RUNNING":
        break
    time.sleep(0.2)
print(serve.status().applications["default"].status)
