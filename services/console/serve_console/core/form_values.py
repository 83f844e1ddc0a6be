"""What a person typed into a form, parsed field by field: all mistakes are found at once, each at its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import msgspec

from serve_common.config.autoscaling import REPLICAS_MAX
from serve_common.errors import BadField
from serve_common.names import check_name, check_route, deployment_tag

TEXT_LENGTH_MAX: Final = 256 * 1024
"""Longest text of one field, in characters."""
_OFF: Final = frozenset({"", "false", "0", "off"})


class FieldsWrong(Exception):
    """A form cannot become a command."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        """``errors`` are by the name of the field; the empty name is the form as a whole."""
        super().__init__("; ".join(f"{name}: {text}" if name else text for name, text in errors.items()))
        self.errors = dict(errors)


@final
class FormValues:
    """The typed texts of a form by field; a field that cannot be parsed is noted in ``errors``."""

    def __init__(self, typed: Mapping[str, str]) -> None:
        self.typed = typed
        self.errors: dict[str, str] = {}

    def finish(self) -> None:
        """Raise `FieldsWrong` if a field could not be parsed."""
        if self.errors:
            raise FieldsWrong(self.errors)

    def text(self, name: str) -> str:
        """The text without blanks around it; empty: nothing was typed."""
        text = self.typed.get(name, "").strip()
        if len(text) > TEXT_LENGTH_MAX:
            self.errors[name] = f"is longer than {TEXT_LENGTH_MAX} characters"
            return ""
        return text

    def required(self, name: str) -> str:
        """The text, which must not be empty."""
        text = self.text(name)
        if not text:
            self.errors.setdefault(name, "must not be empty")
        return text

    def optional(self, name: str) -> str | None:
        """The text; None: nothing was typed."""
        return self.text(name) or None

    def tag(self, name: str) -> str:
        """The name of a deployment, backend or endpoint, as a full tag."""
        text = self.required(name)
        try:
            return deployment_tag(text, name) if text else ""
        except BadField as error:
            self.errors[name] = error.reason
            return text

    def plain_name(self, name: str) -> str:
        """The name of an application or the id of a host."""
        text = self.required(name)
        try:
            return check_name(text, name) if text else ""
        except BadField as error:
            self.errors[name] = error.reason
            return text

    def route(self, name: str) -> str | None:
        """A path prefix; None: nothing was typed."""
        text = self.text(name)
        try:
            return check_route(text, name) if text else None
        except BadField as error:
            self.errors[name] = error.reason
            return None

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number; None: nothing was typed."""
        text = self.text(name)
        if not text:
            return None
        try:
            number = int(text)
        except ValueError:
            self.errors[name] = f"{text[:40]!r} is no whole number"
            return None
        if not low <= number <= high:
            self.errors[name] = f"must be between {low:,} and {high:,}"
            return None
        return number

    def replicas(self, name: str) -> int | None:
        """A number of replicas; None: nothing was typed."""
        return self.integer(name, 0, REPLICAS_MAX)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number; None: nothing was typed."""
        text = self.text(name)
        if not text:
            return None
        try:
            number = float(text)
        except ValueError:
            self.errors[name] = f"{text[:40]!r} is no number"
            return None
        if not low <= number <= high:
            self.errors[name] = f"must be between {low:g} and {high:g}"
            return None
        return number

    def share(self, name: str) -> float | None:
        """A share of 1 that was typed in percent; None: nothing was typed."""
        percent = self.number(name, 0, 100)
        return None if percent is None else round(percent / 100, 10)

    def json(self, name: str) -> Any:
        """A value that was typed as JSON; None: nothing was typed."""
        text = self.text(name)
        if not text:
            return None
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            self.errors[name] = f"is not JSON: {error}"
            return None

    def json_object(self, name: str) -> dict[str, Any]:
        """An object that was typed as JSON; empty: nothing was typed."""
        value = self.json(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.errors[name] = 'must be a JSON object, such as {"name": 1}'
            return {}
        return value

    def json_list(self, name: str) -> list[Any]:
        """A list that was typed as JSON; empty: nothing was typed."""
        value = self.json(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.errors[name] = "must be a JSON array, such as [1, 2]"
            return []
        return value

    def comma_list(self, name: str) -> list[str]:
        """Texts with commas between; empty: nothing was typed."""
        return [part.strip() for part in self.text(name).split(",") if part.strip()]

    def is_on(self, name: str) -> bool:
        """Whether a box is checked."""
        return is_on(self.typed.get(name, ""))

    def shares(self, prefix: str) -> dict[str, float]:
        """Shares by tag, from fields named ``<prefix>.<tag>`` that are not empty. They must come to 100 %."""
        names = [name for name in self.typed if name.startswith(f"{prefix}.")]
        found = {name: self.share(name) for name in names}
        weights = {
            name.removeprefix(f"{prefix}."): share for name, share in found.items() if share is not None
        }
        total = sum(weights.values())
        if not any(name in self.errors for name in names) and abs(total - 1) > 1e-6:
            self.errors[""] = f"The shares come to {total * 100:g} %; they must come to 100 %."
        return weights


def is_on(text: str) -> bool:
    """Whether the value of a checkbox means that it is checked."""
    return text.strip().lower() not in _OFF


def find_field(names: Sequence[str], path: str) -> str:
    """The form's field that a refusal is about, by the ``path`` that the controller names; empty: none of them."""
    parts = path.replace("[", ".").replace("]", "").split(".")
    candidates = [path, *(".".join(parts[start:]) for start in range(len(parts)))]
    candidates += [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    candidates += reversed(parts)
    return next((candidate for candidate in candidates if candidate in names), "")


def whole(number: float) -> float:
    """The number as an integer if it is one, as people write it."""
    return int(number) if number == int(number) else number


def get_changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``now`` that ``was`` lacks or has otherwise."""
    return {name: value for name, value in now.items() if name not in was or was[name] != value}


def pretty_json(value: Any) -> str:
    """JSON that people can edit."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def get_subject(command: Any) -> str:
    """The name, tag or id of the object that a command names; empty: it names none."""
    for field in ("name", "endpoint", "backend_tag", "host_id"):
        found = getattr(command, field, None)
        if isinstance(found, str):
            return found
    return ""
