"""The form that a request wants of a text, in the names of OpenAI and text-generation-inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .refusals import invalid

#: The types of forms, under all of their names.
FORM_KINDS = ("text", "json_object", "json_schema", "json", "regex")


def text_form(value: object, field: str) -> dict[str, Any]:
    """The model's parameter for a ``response_format`` or a ``grammar``; empty for any text.

    Args:
        field: the name of the value in the request.

    Raises:
        Refusal: it is none of the forms.
    """
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in FORM_KINDS:
        raise invalid(f"{field}.type", f"must be one of {', '.join(map(repr, FORM_KINDS))}")
    if kind == "text":
        return {}
    if kind == "regex":
        name = "pattern" if "pattern" in value else "value"
        _check_names(value, {"type", name}, field)
        pattern = value.get(name)
        if not isinstance(pattern, str) or not pattern:
            raise invalid(f"{field}.{name}", "must be a regular expression")
        return {"regex": pattern}
    if kind == "json_object" and value.keys() == {"type"}:
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema" and "json_schema" in value:  # OpenAI's
        _check_names(value, {"type", "json_schema"}, field)
        inner, place = value["json_schema"], f"{field}.json_schema"
        if not isinstance(inner, Mapping):
            raise invalid(place, "must be an object with a schema")
        _check_names(inner, {"name", "description", "schema", "strict"}, place)
        return {"json_schema": _schema(inner.get("schema"), f"{place}.schema")}
    _check_names(value, {"type", "value"}, field)
    wanted = value.get("value")
    if kind == "json_schema" and isinstance(wanted, Mapping) and "schema" in wanted:
        return {"json_schema": _schema(wanted["schema"], f"{field}.value.schema")}
    return {"json_schema": _schema(wanted, f"{field}.value")}


def _schema(value: object, place: str) -> Any:
    if isinstance(value, str):  # text-generation-inference takes it as a text, too
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise invalid(place, "must be a JSON schema, which is an object")
    return value


def _check_names(value: Mapping[str, Any], known: set[str], place: str) -> None:
    for name in value:
        if name not in known:
            raise invalid(place, f"unknown field `{name[:60]}`", "unknown_parameter")
