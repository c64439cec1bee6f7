"""For the documentation site: the docstrings of constructors with their options.

The section "Args" is made of the declared options when a class is imported. The site is made of the
source, which does not have it.
"""

from __future__ import annotations

from typing import Any

import griffe

from service_streamer.options import table
from service_streamer.options.kinds import with_arguments


class ConstructorDocstrings(griffe.Extension):
    """Does to classes what their decorator ``documented`` does."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        for decorator in cls.decorators:
            name, _bracket, options = str(decorator.value).rstrip(")").partition("(")
            if name == "documented" and cls.docstring is not None:
                names = [each.name for each in cls["__init__"].parameters]
                cls.docstring.value = with_arguments(
                    cls.docstring.value, getattr(table, options), names
                )
