"""promtool itself judges the alert rules: they are rules, and each fires when it should and only then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.integration import promtool

DIRECTORY = Path(__file__).parents[2] / "deploy/prometheus"
RULES = sorted(str(file.relative_to(DIRECTORY)) for file in DIRECTORY.glob("rules/*.yml"))
TESTS = sorted(str(file.relative_to(DIRECTORY)) for file in DIRECTORY.glob("tests/*.yml"))

# Containers of promtool take long to start where much else does.
pytestmark = [pytest.mark.alone, pytest.mark.integration, pytest.mark.timeout(600)]


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert TESTS
    for command in promtool.commands(DIRECTORY):
        done = promtool.run([*command, "test", "rules", *TESTS], DIRECTORY)
        assert done.returncode == 0, done.stdout + done.stderr
        checked = promtool.run([*command, "check", "rules", *RULES], DIRECTORY)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_configuration_of_compose_finds_all_rules() -> None:
    in_image = [command for command in promtool.commands(DIRECTORY) if command[0] == "docker"]
    if not in_image:
        assert os.environ.get(promtool.REQUIRED) != "1", f"{promtool.REQUIRED}=1, but there is no image"
        pytest.skip("NOT TESTED: the paths of prometheus.yml, for they are those of the image")
    done = promtool.run([*in_image[0], "check", "config", "prometheus.yml"], DIRECTORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == len(RULES), done.stdout


def test_promtool_notices_an_alert_that_no_longer_does_what_its_test_says(tmp_path: Path) -> None:
    for part in ("rules", "tests"):
        shutil.copytree(DIRECTORY / part, tmp_path / part)
    rules = tmp_path / "rules/scaling.yml"
    rules.write_text(rules.read_text().replace("for: 1m", "for: 5m"))
    tmp_path.chmod(0o755)
    command = promtool.commands(tmp_path)[0]
    done = promtool.run([*command, "test", "rules", "tests/scaling.yml"], tmp_path)
    assert done.returncode != 0
    assert "MusterScalingDataStale" in done.stdout + done.stderr
