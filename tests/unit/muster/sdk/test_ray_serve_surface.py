"""Names, fields and signatures against the installed package of Ray Serve, which is read and not imported.

What is missing here on purpose is listed with its reason; a new release of Ray Serve that adds a name fails this.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import muster
from muster.config import AutoscalingConfig
from muster.exceptions import BackPressureError, RayServeException, RequestCancelledError
from muster.schema import HTTPOptionsSchema
from muster.sdk.absent import ABSENT
from serve_common.errors import ServeError
from tests.support.paths import ROOT

RAY_SERVE = Path(str(importlib.util.find_spec("ray").origin)).parent / "serve"  # type: ignore[union-attr]

MODULES = ("autoscaling_policy", "config", "context", "exceptions", "handle", "metrics", "schema")
CONSTANTS = {
    "TARGET_CAPACITY_FIELD",
    "DEFAULT_PROMETHEUS_CACHE_TTL_S",
    "DEFAULT_PROMETHEUS_FETCH_INTERVAL_S",
    "DEFAULT_PROMETHEUS_QUERY_TIMEOUT_S",
}
"""Public constants that serve the definition of classes only."""
NO_CLASSES = {"gRPCStatusError"}
"""Classes that may be named and caught, and not made."""
OTHER_FIELDS = {"AutoscalingContext"}
"""Classes of which Muster's own have other fields."""
OWN = {"DeploymentSchema": {"rollout"}, "deployment": {"rollout"}}
"""Fields and parameters that only Muster has."""


def classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((RAY_SERVE / f"{module}.py").read_text())
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def fields(node: ast.ClassDef) -> set[str]:
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not each.target.id.startswith("_")
    }


def members(node: ast.ClassDef) -> dict[str, Any]:
    return {
        target.id: ast.literal_eval(each.value)
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name) and isinstance(each.value, ast.Constant)
    }


def public_names(module: str) -> set[str]:
    """Classes, functions and constants that the module defines itself."""
    tree = ast.parse((RAY_SERVE / f"{module}.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and len(target.id) > 1
    }
    return {name for name in defined | constants if not name.startswith("_")} - CONSTANTS


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_every_public_name_of_its_namesake(module: str) -> None:
    ours = importlib.import_module(f"muster.{module}")
    names = public_names(module) if module != "metrics" else {"Counter", "Gauge", "Histogram"}
    assert names
    assert [name for name in sorted(names) if not hasattr(ours, name)] == []


def absent_names() -> set[str]:
    return {name for names in ABSENT.values() for name in names}


def test_the_page_lists_what_a_module_has_in_name_only() -> None:
    listed = {name for row in table("Names of modules") for name in row.replace("`", "").split(", ")}
    assert listed == absent_names() | NO_CLASSES
    assert absent_names() <= {name for module in ABSENT for name in public_names(module)}


@pytest.mark.parametrize("module", ABSENT)
def test_what_is_not_there_says_so_when_it_is_used(module: str) -> None:
    ours = importlib.import_module(f"muster.{module}")
    for name, instead in ABSENT[module].items():
        kind: Any = getattr(ours, name)
        assert kind is getattr(ours, name)
        words = f"^{name}.* is not there in Muster: {re.escape(instead)}"
        with pytest.raises(RayServeException, match=words):
            kind(a=1)
        with pytest.raises(RayServeException, match=words):
            _ = kind.FIRST
        with pytest.raises(RayServeException, match=words):
            type(kind)("Own", (kind,), {})
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = ours.Nonsense
    with pytest.raises(ServeError, match="gRPC ingress"):
        muster.exceptions.gRPCStatusError(ValueError("x"))


@pytest.mark.parametrize("module", ["config", "schema"])
def test_every_field_and_every_member_is_there(module: str) -> None:
    ours, compared = importlib.import_module(f"muster.{module}"), 0
    for name, node in classes(module).items():
        if name in OTHER_FIELDS or name in absent_names():
            continue
        mine = getattr(ours, name)
        if issubclass(mine, Enum):
            assert {member.name: member.value for member in mine} == members(node), name
        else:
            known = set(mine.model_fields) if issubclass(mine, BaseModel) else set(mine.__annotations__)
            assert known - OWN.get(name, set()) == fields(node), name
        compared += 1
    assert compared >= 10


def signature(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def exported_names() -> set[str]:
    exported = ast.parse((RAY_SERVE / "__init__.py").read_text())
    return set(
        next(
            ast.literal_eval(node.value)
            for node in exported.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        )
    )


def test_every_function_has_the_same_parameters() -> None:
    tree, compared = ast.parse((RAY_SERVE / "api.py").read_text()), 0
    names = exported_names()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name not in names:
            continue
        theirs, ours = signature(node), list(inspect.signature(getattr(muster, node.name)).parameters)
        private = {name for name in theirs if name.startswith("_") and name not in ours}
        assert [name for name in theirs if name not in private] == [
            name for name in ours if name != "kwargs" and name not in OWN.get(node.name, set())
        ], node.name
        compared += 1
    assert compared >= 12


def test_every_option_of_a_deployment_is_known() -> None:
    [node] = [
        each
        for each in classes("deployment")["Deployment"].body
        if isinstance(each, ast.FunctionDef) and each.name == "options"
    ]
    from muster.sdk.deployments import OptionValues

    theirs = {name for name in signature(node) if not name.startswith("_")} - {"self", "func_or_class"}
    assert theirs <= set(OptionValues.__annotations__)


def table(heading: str) -> dict[str, str]:
    """The rows of the page's table under ``heading``: what is said of each name."""
    text = (
        (ROOT / "docs" / "coming-from-ray-serve.md")
        .read_text()
        .partition(f"## {heading}\n")[2]
        .partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[1].strip("`"): row[2] for row in rows}


def test_the_page_says_of_every_name_whether_it_is_there() -> None:
    said = table("Names")
    assert set(said) == exported_names()
    for name, state in said.items():
        assert state in ("works", "differs", "not there")
        found = getattr(muster, name)
        if state == "not there":
            with pytest.raises(ServeError, match=f"{name}.* is not there"):
                found("name") if inspect.signature(found).parameters else found()


def test_the_page_says_of_every_option_whether_it_works() -> None:
    from muster.sdk.deployments import OptionValues

    said = table("Options of a deployment")
    assert set(said) == set(OptionValues.__annotations__)
    for name, state in said.items():
        assert state in ("works", "differs", "not there"), name
        if state == "not there":
            with pytest.raises(ValueError, match=name):
                muster.deployment(**{name: [{}]})(test_the_page_says_of_every_option_whether_it_works)


def test_errors_are_made_as_in_ray_serve() -> None:
    full = BackPressureError(num_queued_requests=3, max_queued_requests=2)
    words = "Request dropped due to backpressure (num_queued_requests=3, max_queued_requests=2)."
    assert (str(full), full.message, full.status_code, full.retry_after_s) == (words, words, 503, None)
    again = pickle.loads(pickle.dumps(BackPressureError(1, 1, 429, 2.0)))
    assert (again.status_code, again.retry_after_s, again.args) == (429, 2.0, (1, 1, 429, 2.0))
    assert str(RequestCancelledError()) == "Request was cancelled."
    cancelled = RequestCancelledError(request_id="r1")
    assert str(cancelled) == str(pickle.loads(pickle.dumps(cancelled))) == "Request r1 was cancelled."


def test_values_of_enumerations_are_texts_and_a_key_needs_its_certificate() -> None:
    assert AutoscalingConfig().aggregation_function == "mean"
    with pytest.raises(ValidationError, match="must be provided together"):
        HTTPOptionsSchema(ssl_keyfile="key.pem")


def test_the_options_of_a_deployment_are_read_by_ray_serves_name() -> None:
    automatic = muster.deployment(num_replicas="auto")(RayServeException)
    config = automatic._deployment_config
    assert (config.max_ongoing_requests, config.autoscaling_config.max_replicas) == (5, 100)
