"""The code of a model, in a word that two processes can compare. Nothing is imported for it.

A model that has a file is known by what the file has. A model that was typed in a notebook, or
that a function has made, travels to the workers by value: it is known by its bytecode, and by the
variables that this reads.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Canonical = Callable[[Any], str]


def code_of(model: Any, canonical: Canonical) -> str:
    """Where the model is, and a digest of its code; "unknown" of what has none.

    Args:
        canonical: the words for a value: see ``wishes``.
    """
    source = _source_of(model)
    if source is not None and not _is_made_by_a_function(model):
        return source
    walked = digest("\n".join(_walk(model, canonical, set())).encode())
    if source is not None:
        return f"{source} {walked}"
    return walked if hasattr(model, "__module__") else "unknown"


def _is_made_by_a_function(model: Any) -> bool:
    """Its file says nothing of the variables around it."""
    return "<" in getattr(model, "__qualname__", "")


def _source_of(model: Any) -> str | None:
    """Its file and a digest of that; None without a file."""
    if isinstance(model, str):
        path = _found(model.partition(":")[0], sys.path, os.path.exists)
        return None if path is None else _read(path, None)
    owner = getattr(model, "__self__", None)
    name = getattr(model if owner is None else type(owner), "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    path = getattr(module, "__file__", None)
    return _read(path, module) if isinstance(path, str) else None


def _read(path: str, module: types.ModuleType | None) -> str | None:
    try:
        with open(path, "rb") as file:
            return f"{os.path.realpath(path)} {digest(file.read())}"
    except OSError:
        pass
    # In an archive; or it is gone, and maybe the loader has it still.
    loader = getattr(module, "__loader__", None)
    try:
        return f"{path} {digest(loader.get_data(path))}"  # type: ignore[union-attr]
    except Exception:
        return None


def _found(module: str, path: Sequence[str], exists: Callable[[str], bool]) -> str | None:
    """The file of a module that is not imported; None if it is not to be found in folders."""
    parts = module.split(".")
    for folder in path:
        start = os.path.join(folder or os.getcwd(), *parts)
        for candidate in (f"{start}.py", os.path.join(start, "__init__.py")):
            if exists(candidate):
                return candidate
    return None


def _walk(value: Any, canonical: Canonical, seen: set[int]) -> Iterator[str]:
    """What makes up a class, a function or a method, and what these read of others like them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.MethodType):
        yield from _walk(value.__func__, canonical, seen)
        yield canonical(value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _walk_function(value, canonical, seen)
    elif isinstance(value, type):
        for base in value.__bases__:
            yield from _walk_part(base, canonical, seen)
        for name, each in sorted(vars(value).items()):
            if name not in _NOT_CODE:
                yield name
                yield from _walk_part(each, canonical, seen)
    else:
        yield from _walk_part(type(value), canonical, seen)
        yield canonical(value)


#: Of a class; these differ between two processes, or say nothing of what is computed.
_NOT_CODE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__"}
    | {"_abc_impl", "__static_attributes__", "__firstlineno__"}
    # Of Python 3.14: the second is there once somebody has asked for annotations.
    | {"__annotate_func__", "__annotations_cache__", "__conditional_annotations__"}
)


def _walk_function(
    function: types.FunctionType, canonical: Canonical, seen: set[int]
) -> Iterator[str]:
    yield from _walk_code(function.__code__, canonical)
    yield canonical(function.__defaults__)
    yield canonical(function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield from _walk_part(cell.cell_contents, canonical, seen)
        except ValueError:  # empty
            yield "empty"
    for name in sorted(_names(function.__code__) & function.__globals__.keys()):
        yield name
        yield from _walk_part(function.__globals__[name], canonical, seen)


def _walk_code(code: types.CodeType, canonical: Canonical) -> Iterator[str]:
    yield digest(code.co_code)
    yield canonical(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _walk_code(const, canonical)
        else:
            yield canonical(const)


def _names(code: types.CodeType) -> set[str]:
    """Of the variables that it may read, its inner functions' too."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))


def _walk_part(value: Any, canonical: Canonical, seen: set[int]) -> Iterator[str]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        for each in (value.fget, value.fset):
            yield from _walk_part(each, canonical, seen)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, (type, types.FunctionType, types.MethodType)) and _has_no_file(value):
        yield from _walk(value, canonical, seen)
    else:
        yield canonical(value)


def _has_no_file(value: Any) -> bool:
    """Whether it travels by value. What can be imported is known by its name."""
    if _is_made_by_a_function(value):
        return True
    # Built-in modules have no file either, and are imported.
    return value.__module__ not in sys.modules or (
        value.__module__ == "__main__" and _source_of(value) is None
    )


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
