"""The fingerprint of a pool: what decides what it computes, in words that two processes compare.

It has the model and its code, the options of the pool, and the versions. What only concerns the
caller may differ: time limits, the cache, traces. Nothing is imported for it.
"""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import os
import pickle
import secrets
import sys
import types
import typing
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from importlib.machinery import PathFinder
from typing import Any

from ..options.kinds import options_of
from ..options.table import CallerOptions, HostPoolOptions, SharingOptions, StreamerOptions
from ..workers.codec import ByValue, is_there
from ..workers.model_spec import describe

#: By name, in words that are equal only if the values are.
Fingerprint = Mapping[str, str]

#: Options that only concern the process that calls.
_OF_CALLERS = {
    each.name
    for group in (CallerOptions, HostPoolOptions, SharingOptions) for each in options_of(group)
} | {"wait_for_worker_ready"}  # fmt: skip

#: Known by a digest only: they may have keys and passwords, and errors and commands show the rest.
_HIDDEN = frozenset({"model_init_args", "model_init_kwargs", "runtime_env"})

#: Characters from which on other options are known by a digest, too.
_LONG = 200

#: Of a digest; so few that a difference is readable.
_DIGITS = 12

_PLAIN = (str, int, float, type(None))


def fingerprint_of(model: Any, options: StreamerOptions, version: str) -> dict[str, str]:
    """The fingerprint of the pool that this process asks for.

    Args:
        version: of this package.
    """
    found = {
        "service_streamer": version,
        "python": f"{sys.version.split()[0]} of {sys.prefix}",
        "model": _words(model),
        "code": _file_of(model) or "unknown",
    }
    for each in options_of(options):
        if each.name in _OF_CALLERS:
            continue
        value = getattr(options, each.name)
        words = _words(value)
        is_hidden = each.name in _HIDDEN and value is not None
        if is_hidden or len(words) > _LONG:
            words = f"(digest {_digest(value)})"
        found[each.name] = words
    return found


def differences(running: Fingerprint, wanted: Fingerprint) -> list[str]:
    """What differs, one by one; empty if nothing does."""
    names = [*wanted, *(name for name in running if name not in wanted)]
    return [
        f"{name} is {running.get(name, 'unknown')} there and {wanted.get(name, 'unknown')} here"
        for name in names
        if running.get(name) != wanted.get(name)
    ]


def _words(value: Any) -> str:
    """Plain values as they are, what workers import by its name, the rest by a digest."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (type, types.FunctionType)) and ByValue().is_known(value):
        return describe(value)
    if isinstance(value, (list, tuple, Mapping)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        if all(isinstance(each, _PLAIN) for pair in pairs for each in pair):
            return repr(sorted(value.items()) if isinstance(value, Mapping) else [*value])
    name = describe(value if hasattr(value, "__qualname__") else type(value))
    return f"{name} {_digest(value)}"


def _file_of(model: Any) -> str | None:
    """The model's file, and a digest of that; None without a file."""
    if isinstance(model, str):
        path, loader = _found(model.partition(":")[0])
    else:
        owner = getattr(model, "__self__", model)
        named = owner if hasattr(owner, "__qualname__") else type(owner)
        module = sys.modules.get(getattr(named, "__module__", ""))
        path, loader = getattr(module, "__file__", None), getattr(module, "__loader__", None)
    readers: list[Any] = [_read_file, getattr(loader, "get_data", None)]  # of folders, archives
    for read in readers:
        with contextlib.suppress(Exception):
            return f"{os.path.realpath(path)} {hashlib.sha256(read(path)).hexdigest()[:_DIGITS]}"
    return None


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _found(module: str) -> tuple[Any, Any]:
    """Path and loader of a module that is not imported, nor are the packages around it."""
    name, folders = "", None
    spec: Any = None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return None, None
        folders = spec.submodule_search_locations
    return spec.origin, spec.loader


def _digest(value: Any) -> str:
    """Of a value's pickle. Without one it is no other's: two unknown models are not one."""
    if isinstance(value, Mapping):
        value = sorted(value.items())
    elif isinstance(value, tuple):
        value = [*value]
    found = hashlib.sha256()
    try:
        _StablePickler(types.SimpleNamespace(write=found.update), 5).dump(value)
    except Exception:
        return f"unknown {secrets.token_hex(_DIGITS // 2)}"
    return found.hexdigest()[:_DIGITS]


class _StablePickler(pickle.Pickler):
    """Makes equal bytes in all processes, which nobody loads.

    Sets have an order of hashes, which each process draws anew, and tensors have addresses. What
    travels to workers by value, as from a notebook, is known by its bytecode and by the variables
    that this reads: its file says nothing of them.
    """

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol)
        self._by_value = ByValue()
        self._code: dict[int, tuple[Any, int]] = {}  # with the value, so that it keeps its identity

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, str):  # whether two equal ones are one says nothing
            return value.encode(errors="surrogatepass")
        if type(value) in (set, frozenset):
            return sorted(map(_digest, value))
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        if isinstance(value, types.CodeType):
            return (value.co_code, value.co_names, value.co_consts)
        if isinstance(value, property):
            return (value.fget, value.fset)
        if isinstance(value, (staticmethod, classmethod)):
            return (type(value).__name__, value.__func__)
        if isinstance(value, types.MappingProxyType):
            return ("mapping", [*value.items()])
        if isinstance(value, (KeysView, ValuesView, ItemsView)):
            return (type(value).__name__, [*value])
        if isinstance(value, _VARIABLES):
            return (type(value).__name__, repr(value))
        if isinstance(value, (type, types.FunctionType)) and not self._is_found(value):
            if id(value) in self._code:
                return self._code[id(value)][1]
            self._code[id(value)] = value, len(self._code)
            return _parts(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return (str(value.dtype), (*value.shape,), flat.numpy().tobytes())
        return None

    def _is_found(self, value: Any) -> bool:
        """Whether this class or function is what every process finds by its name."""
        # Not in ``<locals>``, nor what a namedtuple makes.
        return self._by_value.is_known(value) and is_there(value)

    def reducer_override(self, value: Any) -> Any:
        """What cannot be pickled, such as an open file, is known by its class only."""
        if isinstance(value, (type, types.FunctionType)) or type(value) in copyreg.dispatch_table:
            return NotImplemented
        try:
            return value.__reduce_ex__(5)
        except Exception:
            return str, (describe(type(value)),)


#: Of generic classes; they have no pickle that all processes can look up.
_VARIABLES = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)


#: Of a class; these differ between two processes, or say nothing of what is computed.
_NOT_CODE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__"}
    | {"_abc_impl", "__static_attributes__", "__firstlineno__"}
    # Of Python 3.14: the second is there once somebody has asked for annotations.
    | {"__annotate_func__", "__annotations_cache__", "__conditional_annotations__"}
)


def _parts(thing: Any) -> tuple[Any, ...]:
    """What a class or a function is made of, and the variables that the function reads."""
    if isinstance(thing, type):
        members = {name: each for name, each in vars(thing).items() if name not in _NOT_CODE}
        return thing.__bases__, members
    cells = [_content(cell) for cell in thing.__closure__ or ()]
    names = sorted(_names(thing.__code__) & thing.__globals__.keys())
    read = [(name, thing.__globals__[name]) for name in names]
    return thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells, read


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _names(code: types.CodeType) -> set[str]:
    """Of the variables that it may read, its inner functions' too."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))
