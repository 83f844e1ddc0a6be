"""`muster init` and `muster completion`: what stands at the beginning."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import Result

from muster.cli import completion
from serve_common.errors import BusUnavailable
from tests.unit.muster.cli.conftest import COMMANDS_BUILT, DEPLOYMENT, PlayedController

Run = Callable[..., Result]


def test_a_project_is_written_whose_test_passes(muster: Run, tmp_path: Path) -> None:
    result = muster("init", "demo")
    assert result.exit_code == 0, result.output
    assert "cd demo && python app.py       # or: muster run app:app" in result.stdout
    project = tmp_path / "demo"
    assert {path.name for path in project.iterdir()} == {
        "app.py", "test_app.py", "README.md", ".musterignore", "requirements.txt",
    }  # fmt: skip
    assert (project / "README.md").read_text().startswith("# demo\n")
    assert "{" not in (project / "README.md").read_text().replace('{"num_gpus": 1}', "")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_project_replaces_nothing(muster: Run, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("mine")
    result = muster("init")
    assert result.exit_code == 2
    assert "app.py already; nothing was written" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]
    assert (tmp_path / "app.py").read_text() == "mine"
    (tmp_path / "file").touch()
    assert muster("init", "file/demo").exit_code == 2


@pytest.fixture
def completing(controller: PlayedController, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What bash offers at the end of a line, beside the stack of ``controller``."""
    prepared = [msgspec.structs.replace(DEPLOYMENT, name=name) for name in ("default/digits", "shop/front")]
    controller.answers["list_deployments"] = prepared
    monkeypatch.setattr(
        completion,
        "connect_stack",
        lambda address, **_: controller.connect(address, retry_for_s=0.0, on_retry=print),
    )
    monkeypatch.setenv(completion.VARIABLE, "complete_bash")
    monkeypatch.setenv("MUSTER_NATS_URL", "nats://stack.example")
    completion.prepare_completion()

    def offer(line: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - (not line.endswith(" "))))
        stdout = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit):
            COMMANDS_BUILT(prog_name="muster", complete_var=completion.VARIABLE)
        return stdout.getvalue().split()

    return offer


def test_commands_and_names_are_completed(
    completing: Callable[[str], list[str]], controller: PlayedController
) -> None:
    assert completing("muster ro") == ["rollback", "rollout"]
    assert completing("muster traffic se") == ["set"]
    assert completing("muster status ") == ["digits", "shop/front"]
    assert completing("muster scale sh") == ["shop/front"]
    assert controller.reached is not None
    assert controller.reached.host == "stack.example"
    completing("muster --nats nats://far.example status ")
    assert controller.reached.host == "far.example"
    controller.raises = BusUnavailable("away")
    assert completing("muster status ") == []


@pytest.mark.parametrize(
    ("shell", "marker"),
    [("bash", "complete -o default -F"), ("zsh", "compdef"), ("fish", "complete --command muster")],
)
def test_each_shell_gets_its_script(muster: Run, shell: str, marker: str) -> None:
    result = muster("completion", shell)
    assert result.exit_code == 0
    assert marker in result.stdout
    assert f"_MUSTER_COMPLETE=complete_{shell}" in result.stdout
    assert muster("completion", "tcsh").exit_code == 2
