"""The page in ``docs/benchmarks/``: its words are written by hand, and no figure of it is.

Between ``<!-- yardstick: NAME -->`` and ``<!-- end -->`` stands what is made of a record.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from yardstick import plots
from yardstick.comparing import headline, in_brief, losses_table
from yardstick.environments import ROOT
from yardstick.originals import original
from yardstick.record import Record
from yardstick.tables import LAYOUTS, failed, made, reason, section, systems, title

__all__ = ["PAGE", "failures", "filled", "write"]

PAGE = ROOT / "docs" / "benchmarks" / "README.md"
#: Those that show some of it, too.
_OTHERS = (ROOT / "README.md",)

_ORIGINALS = ("original-flask", "original-gevent", "original-futures")
_SPECIAL: dict[str, Callable[[Record], str]] = {
    "machine": made,
    "headline": headline,
    "in-brief": in_brief,
    "losses": losses_table,
    "systems": systems,
    "failures": lambda record: _all_failures(record),
}
_BLOCK = re.compile(r"(<!-- yardstick: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOTHING = "Not measured in this run."


def write(record: Record, folder: Path) -> None:
    """Write the tables and the plots.

    The page's own folder has the page, whose blocks are replaced; elsewhere its text becomes
    ``report.md``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE.name
    text = (page if page.exists() else PAGE).read_text("utf-8")
    path = page if page.exists() else folder / "report.md"
    drawn = plots.write(record, folder)
    path.write_text(filled(text, record, drawn), "utf-8")
    for other in _OTHERS if page == PAGE else ():
        other.write_text(filled(other.read_text("utf-8"), record, drawn), "utf-8")


def filled(text: str, record: Record, drawn: dict[str, str]) -> str:
    """A page with the record's tables in its blocks.

    Args:
        drawn: of each plot that there is, what it shows in words.

    Raises:
        ValueError: a block has a name that nothing is made for.
    """

    def replaced(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        return f"{begin}\n{_made(name, record, drawn)}\n\n{end}"

    return _BLOCK.sub(replaced, text)


def failures(record: Record) -> str:
    """What could not be measured, for a terminal."""
    if not record.failures:
        return "everything was measured"
    lines = [
        f"  {each.section}, {title(each.system)}, round {each.round}: {reason(each)}"
        for each in record.failures
    ]
    return "\n".join(["not everything was measured:", *lines])


def _made(name: str, record: Record, drawn: dict[str, str]) -> str:
    if name in _SPECIAL:
        return _SPECIAL[name](record)
    if name.startswith("plot-"):
        plot = name.removeprefix("plot-")
        if plot not in plots.PLOTS:
            raise ValueError(f"there is no plot {plot}: there are {', '.join(plots.PLOTS)}")
        return f"![{drawn[plot]}]({plot}.svg)" if plot in drawn else _NOTHING
    if name not in LAYOUTS and name not in _ORIGINALS:
        known = [*_SPECIAL, *LAYOUTS, *_ORIGINALS]
        raise ValueError(f"nothing is made for the block {name}: there are {', '.join(known)}")
    if name not in record.sections():
        return _NOTHING
    return original(record, name) if name in _ORIGINALS else section(record, name)


def _all_failures(record: Record) -> str:
    lists = [(key, failed(record, key)) for key in record.sections()]
    return "\n".join(f"{key}:\n\n{text}\n" for key, text in lists if text).strip() or "Nothing."
