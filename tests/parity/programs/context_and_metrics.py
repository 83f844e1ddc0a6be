import logging
from ray import serve
from ray.serve import metrics
from ray.serve.exceptions import RayServeException

logger = logging.getLogger("ray.serve")


@serve.deployment(name="Ctx")
class C:
    def __init__(self):
        self.c = metrics.Counter("my_c", description="d", tag_keys=("k",))
        self.c.set_default_tags({"k": "v"})
        self.g = metrics.Gauge("my_g")
        self.h = metrics.Histogram("my_h", boundaries=[1, 2, 3])
        ctx = serve.get_replica_context()
        self.inited = ctx.deployment

    def __call__(self):
        self.c.inc()
        self.c.inc(2, tags={"k": "w"})
        self.g.set(3)
        self.h.observe(1.5)
        logger.info("hello %s", "x")
        ctx = serve.get_replica_context()
        return (
            ctx.app_name,
            ctx.deployment,
            type(ctx.replica_tag).__name__,
            type(ctx.servable_object).__name__,
            ctx.servable_object is self,
            self.inited,
        )


h = serve.run(C.bind(), name="ap")
print(h.remote().result())
try:
    serve.get_replica_context()
except Exception as e:
    print(isinstance(e, RayServeException))
