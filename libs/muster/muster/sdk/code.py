"""Code as bytes: pickles of a class or function with its arguments, the same for the same code in every process.

Why not cloudpickle's own bytes: they differ between processes (random ids of classes, the order of sets, strings that
happen to be one object), and the digest of the bytes decides whether replicas are replaced. So this pickler is the
standard library's in Python, with cloudpickle's reducers, in an order of its own. What an installed module defines is
still pickled by its name; what ``__main__``, a notebook or a test defines, by value.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import pickle
import re
import struct
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
from cloudpickle import cloudpickle as reducers
from pydantic import BaseModel
from starlette.datastructures import State

from serve_common.errors import BadField
from serve_common.protocol.code import check_size, code_header
from serve_common.runtime.ray_references import let_references_travel

# A FastAPI application has one; unpickled as usual, its __getattr__ would look for itself without end.
copyreg.pickle(State, lambda state: (State, (vars(state)["_state"],)))

_NO_FILES: Final[Mapping[str, str]] = types.MappingProxyType({})
_ATOMS: Final = frozenset({str, bytes, int, float, complex, bool, type(None)})
_DEPTH_MAX: Final = 12


class CodeUnpicklable(BadField, TypeError):
    """The code or its arguments cannot be pickled; the field is the path to what cannot.

    A TypeError, as in Ray Serve.
    """

    error_code = "code_unpicklable"


def find_file(name: str) -> str:
    """The path of a file that travelled, in the replica's process; ``name`` itself when it is not there."""
    paths = (os.path.join(place, name) for place in sys.path)  # noqa: PTH118 - places may be anything
    return next((path for path in paths if os.path.isfile(path)), name)  # noqa: PTH113 - as above


@final
class _TravellingFile:
    """Takes the place of a path that is another one in the replica's process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return find_file, (self._name,)


_Pickler: Any = pickle._Pickler  # noqa: SLF001 - the documented one is in C, and orders nothing
_Reducers: Any = cloudpickle.Pickler


_CORE_REFERENCE: Final = re.compile(r"(?P<module>[\w.]+)\.(?P<name>[\w.<>]+):(?P<id>\d{6,})(?=\W|$)")
"""How Pydantic's schemas name a class: with its address, which differs between processes."""


@final
class CodePickler(_Pickler):  # type: ignore[misc]  # as above
    """Pickles code canonically."""

    dispatch_table = _Reducers.dispatch_table
    dispatch: dict[type[Any], Any] = dict(_Pickler.dispatch)  # noqa: RUF012 - the base's attribute
    _function_reduce = _Reducers._function_reduce  # noqa: SLF001 - cloudpickle has no other way in

    def __init__(
        self,
        file: io.BytesIO,
        replace: Callable[[Any], Any] | None = None,
        files: Mapping[str, str] = _NO_FILES,
    ) -> None:
        """``replace`` returns what is pickled instead of an object, or that itself; ``files`` as in `dump_code`."""
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.globals_ref: dict[int, dict[str, Any]] = {}
        self._replace = replace
        self._addresses: dict[int, int] = {}
        """Numbers of classes that Pydantic's schemas name, by their addresses."""
        self._files = files

    def _function_getnewargs(self, function: types.FunctionType) -> Any:
        made = _Reducers._function_getnewargs(self, function)  # noqa: SLF001 - as above
        self._relocate(made[1])
        return made

    def _relocate(self, names: dict[str, Any]) -> None:
        """Let ``__file__`` among a function's globals be where its file is when they are loaded."""
        place = self._files.get(str(names.get("__file__")))
        if place is not None:
            names["__file__"] = _TravellingFile(place)

    def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
        reduced = _Reducers._dynamic_function_reduce(self, function)  # noqa: SLF001 - as above
        make, arguments, (state, slots), *others = reduced
        self._relocate(slots["__globals__"])
        slots["_cloudpickle_submodules"].sort(
            key=lambda module: module.__name__
        )  # in the order of imports else
        return (make, arguments, (state, slots), *others)

    def reducer_override(self, value: Any) -> Any:
        """Cloudpickle's reducers for functions and classes; ids of classes follow from their content."""
        if self._replace is not None:
            instead = self._replace(value)
            if instead is not value:
                return instead.__reduce__()
        kind = type(value)
        if kind.__name__ == "_IncludedRouter" and kind.__module__ == "fastapi.routing":
            # The rest of it is a cache of routes, with a lock.
            return kind, (value.original_router, value.include_context)
        if isinstance(value, type):
            reduced = reducers._class_reduce(value)  # noqa: SLF001 - as above
            if reduced is NotImplemented or reduced[0] not in _SKELETONS:
                return reduced
            make, arguments, (state, slots), *others = reduced
            arguments = list(arguments)
            arguments[_SKELETONS[make]] = None if value in _tracking else _track(value, self._files)
            if "__dataclass_fields__" in state and (state.get("__doc__") or "").startswith(
                f"{value.__name__}("
            ):
                state = {**state, "__doc__": None}  # generated, with the representation of sets
            return (make, tuple(arguments), (state, slots), *others)
        if isinstance(value, types.FunctionType):
            return self._function_reduce(value)
        return NotImplemented

    def _save_str(self, value: str) -> None:
        if ":" in value and "." in value and _CORE_REFERENCE.match(value):
            value = _CORE_REFERENCE.sub(self._number_class, value)
        encoded = value.encode("utf-8", "surrogatepass")
        length = len(encoded)
        if length <= 0xFF:
            self.write(pickle.SHORT_BINUNICODE + struct.pack("<B", length) + encoded)
        elif length > 0xFFFFFFFF:
            self._write_large_bytes(pickle.BINUNICODE8 + struct.pack("<Q", length), encoded)
        else:
            self._write_large_bytes(pickle.BINUNICODE + struct.pack("<I", length), encoded)

    def _number_class(self, found: re.Match[str]) -> str:
        """A reference with a number in the place of the address, if it is a class' address."""
        address = int(found["id"])
        if address not in self._addresses and not _is_class(found["module"], found["name"], address):
            return found[0]
        number = self._addresses.setdefault(address, len(self._addresses))
        return f"{found['module']}.{found['name']}:{number}"

    def _save_bytes(self, value: bytes) -> None:
        length = len(value)
        if length <= 0xFF:
            self.write(pickle.SHORT_BINBYTES + struct.pack("<B", length) + value)
        elif length > 0xFFFFFFFF:
            self._write_large_bytes(pickle.BINBYTES8 + struct.pack("<Q", length), value)
        else:
            self._write_large_bytes(pickle.BINBYTES + struct.pack("<I", length), value)

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        if value and all(type(item) in _ATOMS for item in value):
            # A constant, which the compiler may have made one object with an equal one, or not.
            self.write(pickle.MARK)
            for item in value:
                self.save(item)
            self.write(pickle.TUPLE)
        else:
            self.save_tuple(value)

    def _save_set(self, value: set[Any]) -> None:
        self.write(pickle.EMPTY_SET)
        self.memoize(value)
        self.write(pickle.MARK)
        for item in _ordered(value):
            self.save(item)
        self.write(pickle.ADDITEMS)

    def _save_frozenset(self, value: frozenset[Any]) -> None:
        self.save_reduce(frozenset, (_ordered(value),), obj=value)

    def _write_large_bytes(self, head: bytes, payload: bytes) -> None:
        self.framer.write_large_bytes(head, payload) if len(payload) >= _FRAME else self.write(head + payload)

    dispatch.update({str: _save_str, bytes: _save_bytes, tuple: _save_tuple})
    dispatch.update({set: _save_set, frozenset: _save_frozenset})


def _is_class(module: str, name: str, address: int) -> bool:
    """Whether a class of that name is at that address: an equal text of the user's stays as it is."""
    parts = f"{module}.{name}".split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        for part in parts[length:]:
            found = getattr(found, part, None)
        if found is not None and id(found) == address:
            return True
    remaining: list[type[Any]] = [BaseModel]
    while remaining:
        kind = remaining.pop()
        if id(kind) == address:
            return True
        remaining += kind.__subclasses__()
    return False


_FRAME: Final = 64 * 1024
_SKELETONS: Final = {
    reducers._make_skeleton_class: 4,  # noqa: SLF001 - as above
    reducers._make_skeleton_enum: 5,  # noqa: SLF001 - as above
}
"""Reconstructors of dynamic classes, and the place of the class' id among their arguments."""
_tracking: Final[set[type[Any]]] = set()
"""Classes whose ids are being made. Guarded by `_lock`: another thread would pickle them without."""
_lock: Final = threading.Lock()


def _track(kind: type[Any], files: Mapping[str, str]) -> str:
    """The id of a dynamic class, by which cloudpickle finds it again in a process that has it: it follows from its
    content, so instances that arrive from another process are of the class that the replica's code has."""
    _tracking.add(kind)
    try:
        identity = hashlib.sha256(_dump(kind, None, files)).hexdigest()
    finally:
        _tracking.discard(kind)
    with reducers._DYNAMIC_CLASS_TRACKER_LOCK:  # noqa: SLF001 - as above
        reducers._DYNAMIC_CLASS_TRACKER_BY_CLASS[kind] = identity  # noqa: SLF001 - as above
        reducers._DYNAMIC_CLASS_TRACKER_BY_ID[identity] = kind  # noqa: SLF001 - as above
    return identity


def _ordered(items: Any) -> list[Any]:
    return sorted(items, key=lambda item: _dump(item, None))


def _dump(value: Any, replace: Callable[[Any], Any] | None, files: Mapping[str, str] = _NO_FILES) -> bytes:
    with io.BytesIO() as file:
        let_references_travel()
        CodePickler(file, replace, files).dump(value)
        return file.getvalue()


def dump_code(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    replace: Callable[[Any], Any] | None = None,
    files: Mapping[str, str] = _NO_FILES,
) -> bytes:
    """Code that a replica makes the target and its arguments of again; equal bytes for equal code.

    ``files`` that travel, by their paths here, have names there: ``__file__`` of code in them is where they are then.
    ``name`` of the deployment is for errors. Raises `CodeUnpicklable`, and `LimitReached` when it is too large.
    """
    content = (target, args, dict(kwargs))
    try:
        with _lock:
            data = code_header(cloudpickle.__version__) + _dump(content, replace, files)
    except Exception as error:  # pickling runs the objects' own code
        with _lock:
            path, reason = _find_culprit(
                {"code": target, "args": args, "kwargs": dict(kwargs)}, name, replace, error
            )
        raise CodeUnpicklable(
            path,
            f"Could not serialize the deployment {name}: this was found to be non-serializable: {reason}",
        ) from error
    check_size(len(data), name)
    return data


def _find_culprit(
    value: Any, path: str, replace: Callable[[Any], Any] | None, error: Exception, depth: int = 0
) -> tuple[str, str]:
    """The path to the innermost value that cannot be pickled, and the reason."""
    if depth < _DEPTH_MAX:
        for name, inner in _parts(value):
            try:
                _dump(inner, replace)
            except Exception as inner_error:  # noqa: BLE001 - as in `dump_code`
                return _find_culprit(inner, f"{path}{name}", replace, inner_error, depth + 1)
    return path, f"{type(error).__name__}: {error}"


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a value holds, by how one would write it."""
    if isinstance(value, dict):
        return [(f"[{key!r}]" if isinstance(key, str) else "[…]", inner) for key, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{at}]", inner) for at, inner in enumerate(value)]
    if isinstance(value, types.FunctionType):
        names = reducers._extract_code_globals(value.__code__)  # noqa: SLF001 - as above
        known = [(f": global {name}", value.__globals__[name]) for name in names if name in value.__globals__]
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        return known + [(f": variable {name}", cell.cell_contents) for name, cell in cells]
    if isinstance(value, type):
        return [
            (f".{name}", inner)
            for name, inner in vars(value).items()
            if callable(inner) or not name.startswith("__")
        ]
    return [(f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()]
