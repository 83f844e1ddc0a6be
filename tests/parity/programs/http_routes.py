import requests
from ray import serve


@serve.deployment
def f(request):
    return "f"


print(requests.get("http://127.0.0.1:8000/-/healthz").text if False else "start")
serve.run(f.bind(), name="a", route_prefix="/a")
serve.run(f.bind(), name="b", route_prefix="/a/b")
serve.run(f.bind(), name="c", route_prefix=None)
base = "http://127.0.0.1:8000"
r = requests.get(base + "/-/routes")
print(r.status_code, r.headers["content-type"], r.json())
r = requests.get(base + "/-/healthz")
print(r.status_code, r.headers["content-type"], r.text)
for path in ["/a", "/a/b", "/a/b/c", "/ab", "/c", "/-/nothing"]:
    r = requests.get(base + path)
    print(path, r.status_code, r.headers.get("content-type"), r.text)
serve.delete("a")
print(requests.get(base + "/-/routes").json())
r = requests.get(base + "/a")
print(r.status_code, r.text)
print(
    sorted(
        (n, a.route_prefix if hasattr(a, "route_prefix") else None)
        for n, a in serve.status().applications.items()
    )
)
