"""The pages in ``docs/benchmarks/``: conclusions, and full tables, which are made of a record.

Between ``<!-- yardstick: NAME -->`` and ``<!-- end -->`` stands what is made of a record.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from yardstick import plots
from yardstick.bars import bars_table
from yardstick.comparing import headline, in_brief, losses_in_brief, losses_table
from yardstick.environments import ROOT
from yardstick.originals import original
from yardstick.record import Record
from yardstick.tables import LAYOUTS, brief, failed, made, reason, section, systems, title

__all__ = ["PAGE", "TABLES", "failures", "filled", "write"]

PAGE = ROOT / "docs" / "benchmarks" / "README.md"
#: Every table, beside the page of conclusions.
TABLES = PAGE.with_name("tables.md")
#: Pages elsewhere that show a part.
_OTHERS = (ROOT / "README.md", ROOT / "README_zh.md")

_ORIGINALS = ("original-flask", "original-gevent", "original-futures")
_SPECIAL: dict[str, Callable[[Record], str]] = {
    "machine": made,
    "bars": bars_table,
    "headline": headline,
    "in-brief": in_brief,
    "losses": losses_table,
    "losses-in-brief": losses_in_brief,
    "systems": systems,
    "failures": lambda record: _all_failures(record),
}
_BLOCK = re.compile(r"(<!-- yardstick: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOTHING = "Not measured in this run."


def write(record: Record, folder: Path) -> None:
    """Write the tables and the plots.

    In a folder with the pages their blocks are replaced. Elsewhere the text of the full tables
    becomes ``report.md``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.write(record, folder)
    pages = [page for name in (PAGE.name, TABLES.name) if (page := folder / name).exists()]
    if not pages:
        text = filled(TABLES.read_text("utf-8"), record, drawn)
        (folder / "report.md").write_text(text, "utf-8")
    for page in [*pages, *(_OTHERS if PAGE in pages else ())]:
        page.write_text(filled(page.read_text("utf-8"), record, drawn), "utf-8")


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
    if name.removeprefix("brief-") in LAYOUTS and name not in LAYOUTS:
        key = name.removeprefix("brief-")
        return brief(record, key) if key in record.sections() else _NOTHING
    if name not in LAYOUTS and name not in _ORIGINALS:
        known = [*_SPECIAL, *LAYOUTS, *_ORIGINALS]
        raise ValueError(f"nothing is made for the block {name}: there are {', '.join(known)}")
    if name not in record.sections():
        return _NOTHING
    return original(record, name) if name in _ORIGINALS else section(record, name)


def _all_failures(record: Record) -> str:
    lists = [(key, failed(record, key)) for key in record.sections()]
    return "\n".join(f"{key}:\n\n{text}\n" for key, text in lists if text).strip() or "Nothing."
