"""Which tests run one after the other on one worker of xdist: those that share a server."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
#: Made on each worker, since they are cheap: folders, and a Redis.
CHEAP = {"server", "pictures", "folder"}
#: They run tests of other files once more, on what they have started.
TAKE_OVER = {"tests/test_ray_streamer.py"}


class Scheduling(LoadScopeScheduling):
    """Sends the tests that share what a module has started to one worker, all others singly."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        if file in TAKE_OVER:
            return file
        return shared(file).get(name.partition("[")[0].rpartition("::")[2], nodeid)


@functools.cache
def shared(file: str) -> dict[str, str]:
    """What a test of this file has to be together with, by its name: a file, or a server."""
    functions = {
        node.name: (
            {each.arg for each in node.args.args},
            " ".join(map(ast.unparse, node.decorator_list)),
        )
        for node in reversed([*ast.walk(ast.parse((ROOT / file).read_text()))])  # inner ones first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    fixtures = {name for name, (_, marks) in functions.items() if "scope='" in marks}
    names = {name for name in fixtures - CHEAP if "autouse" not in functions[name][1]}
    for _ in range(3):  # fixtures that use those
        names |= {
            name
            for name, (uses, marks) in functions.items()
            if "pytest.fixture" in marks and uses & names
        }
    is_made = "fixture" in fixtures  # by a function, under names that are not known here
    found = {name: file for name, (uses, _) in functions.items() if is_made or uses & names}
    one = {name: "infilling" for name, (uses, _) in functions.items() if "infilling" in uses}
    return found | one
