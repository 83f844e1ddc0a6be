"""Options that the commands for applications of Ray Serve's form have in common; nothing heavy is imported here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from muster.cli import parsing
from muster.cli.output import print_error
from serve_common.errors import BadField

FILE_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json"})
"""What a file of applications ends in; others are taken for one when they are there."""
_PANEL: Final = "Applications of muster.deployment's"

RuntimeEnvOption = Annotated[
    str | None,
    typer.Option(
        "--runtime-env",
        metavar="FILE",
        help="YAML file with the runtime_env of all replicas of the application.",
        rich_help_panel=_PANEL,
    ),
]
RuntimeEnvJsonOption = Annotated[
    str | None,
    typer.Option(
        "--runtime-env-json",
        metavar="JSON",
        help="The runtime_env of all replicas of the application.",
        rich_help_panel=_PANEL,
    ),
]
WorkingDirOption = Annotated[
    str | None,
    typer.Option(
        "--working-dir",
        metavar="DIR",
        help="working_dir of the runtime_env; overrides the one in --runtime-env.",
        rich_help_panel=_PANEL,
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="ADDRESS",
        help="Accepted from scripts for Ray Serve, and without effect: --nats, MUSTER_NATS_URL or a context name the "
        "stack.",
    ),
]
AppDirOption = Annotated[
    str,
    typer.Option(
        "--app-dir",
        "-d",
        metavar="DIR",
        help="Directory to import the module from; first on the Python path.",
    ),
]


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for one application that is named by its import path; None for one that is not set."""

    runtime_env: str | None = None
    runtime_env_json: str | None = None
    working_dir: str | None = None
    route_prefix: str | None = None

    @property
    def has_environment(self) -> bool:
        """Whether any option is set that makes the runtime environment."""
        return (self.runtime_env, self.runtime_env_json, self.working_dir) != (None, None, None)

    def ignored_with_file(
        self, name: str | None, arguments: Sequence[str], *, has_environment: bool
    ) -> str | None:
        """One line that names the options that a file makes void, as with Ray Serve; None for none.

        With ``has_environment`` those of the runtime environment count as well: they are the defaults of the file.
        """
        chosen = {
            "--name": name,
            "--route-prefix": self.route_prefix,
            "Application arguments": arguments or None,
        }
        if not has_environment:
            chosen |= {
                "--runtime-env": self.runtime_env,
                "--runtime-env-json": self.runtime_env_json,
                "--working-dir": self.working_dir,
            }
        names = [option for option, value in chosen.items() if value is not None]
        return f"note: {', '.join(names)} are ignored when running a config file" if names else None

    def read_runtime_env(self, directory: Path) -> dict[str, Any]:
        """The ``runtime_env`` that the options make. Raises `BadField`."""
        file, text = self.runtime_env, self.runtime_env_json
        if file is not None and text is not None:
            raise BadField(
                "--runtime-env-json", "Only one of --runtime-env and --runtime-env-json can be provided"
            )
        runtime_env = parsing.read_object(text, directory, "--runtime-env-json")
        if file is not None:
            runtime_env = parsing.yaml_value(parsing.read_text(directory / file, "--runtime-env"), file)
            if not isinstance(runtime_env, dict):
                raise BadField("--runtime-env", f"{file} must hold an object")
        return runtime_env if self.working_dir is None else {**runtime_env, "working_dir": self.working_dir}


def note_address(address: str | None) -> None:
    """Say in one line that Ray's address has no effect, where one is given."""
    if address is not None:
        print_error(
            f"note: without effect in Muster: --address {address}; the stack is found, or --nats, MUSTER_NATS_URL or a "
            "context names it"
        )


def names_application(import_path: str, directory: Path) -> bool:
    """Whether a module below ``directory`` assigns what the path names, as ``app = Model.bind()`` does, or defines a
    function that is annotated to return an ``Application``. The module is read, and not imported.
    """
    module, _, attribute = import_path.partition(":")
    path = directory / module.replace(".", "/")
    source = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    if source is None:
        return False
    try:
        statements = ast.parse(source.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the import tells what is wrong
    for each in statements:
        match each:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if name == attribute:
                return isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".bind")
            case ast.FunctionDef(name=name, returns=returns) if name == attribute and returns is not None:
                return ast.unparse(returns).strip("'\"").endswith("Application")
    return False


def read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """``key=value`` of the command line, by key. Raises `BadField`."""
    values: dict[str, str] = {}
    for text in arguments:
        key, _, value = text.partition("=")
        if not key or not value:
            raise BadField(
                "KEY=VALUE", f"Invalid application argument {text[:80]!r}, must be of the form '<key>=<val>'."
            )
        values[key] = value
    return values
