"""Names of Ray Serve that Muster does not have.

Why they exist at all: a program that only imports one, or names it in an annotation, runs; what uses one gets an error
that says so and names the substitute.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn, final

from serve_common.errors import PermanentError


class NotInMuster(PermanentError, AttributeError):
    """Ray Serve has it, Muster does not; the message names the substitute."""

    error_code = "not_in_muster"

    def __init__(self, name: str, instead: str) -> None:
        """``instead`` is the substitute, or why there is none."""
        super().__init__(f"{name} is not there in Muster: {instead}")


@final
class _Absent(type):
    """Type of classes that cannot be used."""

    _instead: str

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise NotInMuster(cls.__name__, cls._instead)

    def __new__(cls, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> _Absent:
        for base in bases:
            raise NotInMuster(base.__name__, vars(base)["_instead"])
        return super().__new__(cls, name, bases, content)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # what tools ask of any class
            raise AttributeError(name)
        raise NotInMuster(f"{cls.__name__}.{name}", cls._instead)


_REST: Final = "there is no dashboard; serve.status() and 'muster status --format json' say how everything is"
_TASKS: Final = "there are no task consumers; let a worker of your queue call a deployment by its handle"
_PROMETHEUS: Final = "scale by a PromQL query instead: the 'query' of muster update --autoscaling-config"
ABSENT: Final = {
    "autoscaling_policy": dict.fromkeys(
        ("PrometheusQueryMixin", "PrometheusSample", "PrometheusScalar", "PrometheusVector"), _PROMETHEUS
    ),
    "schema": {
        **dict.fromkeys(
            (
                "APIType",
                "ApplicationDetails",
                "AutoscalingMetricsHealth",
                "AutoscalingStatus",
                "ControllerHealthMetrics",
                "DeploymentAutoscalingDetail",
                "DeploymentDetails",
                "DeploymentNode",
                "DeploymentTopology",
                "DurationStats",
                "ProxyDetails",
                "ReplicaDetails",
                "ScaleDeploymentRequest",
                "ScalingDecision",
                "ServeActorDetails",
                "ServeInstanceDetails",
                "Target",
                "TargetGroup",
            ),
            _REST,
        ),
        **dict.fromkeys(
            ("CeleryAdapterConfig", "TaskProcessorAdapter", "TaskProcessorConfig", "TaskResult"), _TASKS
        ),
    },
    "context": {
        "DeploymentActorContext": "bind another deployment with one replica, and call it by its handle"
    },
}
"""Absent classes and their substitutes, by the module that Ray Serve has them in."""
_made: Final[dict[tuple[str, str], Any]] = {}


def absent(module: str, name: str) -> Any:
    """The stand-in of an absent class; for ``__getattr__`` of the module. Raises AttributeError for any other name."""
    instead = ABSENT[module].get(name)
    if instead is None:
        raise AttributeError(f"module 'muster.{module}' has no attribute {name!r}")
    return _made.setdefault((module, name), _Absent(name, (), {"_instead": instead}))


def get_deployment_actor(actor_name: str) -> NoReturn:  # noqa: ARG001 - Ray Serve's signature
    """Raises `NotInMuster`: there are no deployment actors."""
    raise NotInMuster("get_deployment_actor()", ABSENT["context"]["DeploymentActorContext"])


def get_deployment_actor_context() -> NoReturn:
    """Raises `NotInMuster`: there are no deployment actors."""
    raise NotInMuster("get_deployment_actor_context()", ABSENT["context"]["DeploymentActorContext"])
