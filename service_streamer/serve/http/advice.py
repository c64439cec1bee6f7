"""What limits a service, with advice for who runs ``serve``: options of the command line. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...observe.explain import Finding

__all__ = ["ADVICE", "advised"]

#: Advice by the name of the finding, in place of that for who writes a program of their own.
ADVICE = {
    "saturated": "Add workers (--workers), each on its own device, or make the model faster.",
    "one caller": "Send requests at the same time, or several inputs in each request.",
    "few callers": "For more throughput send more requests at a time.",
    "overhead": "Send several inputs in each request, or serve with --web-workers.",
    "padding": "Say what an input costs (--length), so that those of similar length share a batch.",
    "transport": "Send less for each input, or several inputs in each request.",
    "late": "",
}

_OPTION = re.compile(r"\b(batch_size|cpu_threads|max_batch_cost|max_latency|max_pending)\b")


def advised(findings: Iterable[Finding]) -> list[str]:
    """A line for each finding."""
    return [str(_advised(finding)) for finding in findings]


def _advised(finding: Finding) -> Finding:
    advice = finding.advice
    if advice and (finding.name != "padding" or "length=" in advice):
        advice = ADVICE.get(finding.name, advice)
    return finding._replace(text=_as_options(finding.text), advice=_as_options(advice))


def _as_options(text: str) -> str:
    return _OPTION.sub(lambda found: "--" + found[0].replace("_", "-"), text)
