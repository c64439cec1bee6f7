"""Generation step by step, with a cache, for any model of transformers that can generate.

``advance(rows, choose)`` adds one token to each of the rows. They may be others at each step: a row
that is new, or whose cache was lost, is computed from its tokens; one that is left out keeps its
cache until it comes again or is dropped. How rows share a forward pass depends on the model:

"padded"     rows of any lengths together, padded on the left
"shifted"    the same, for models that count positions from the padding on (``position_table``)
"aligned"    rows of the same length together, if that does not help
"alone"      each row by itself, as ``model.generate`` does it, for caches that cannot be joined

``suitable_loop`` finds the first of them that computes what the model computes without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .cached_rows import CachedRows, GeneratedRow, LoneRow, ModelCall

__all__ = ["Choose", "StepLoop", "Way"]

Way = Literal["padded", "shifted", "aligned", "alone"]
Choose = Callable[[Any, "list[GeneratedRow]"], list[int]]

#: Rows whose lengths differ more are computed from their tokens in several passes: otherwise most
#: of a pass may be padding.
_ALIKE = 2

#: Tokens that are computed in one forward pass of new rows, padding and those that an encoder reads
#: included, unless one row alone has more: this bounds the memory of the pass. Arbitrary.
_MOST_NEW = 8192


class StepLoop:
    """Adds a token to each of many rows at a time. Belongs to one thread.

    Args:
        model: a model of transformers that can generate, on its device, in ``eval`` mode.
        way: how rows share a forward pass.
    """

    def __init__(self, model: Any, way: Way = "padded") -> None:
        self.way = way
        self._call = ModelCall(model, shifts=way == "shifted")
        self._homes: list[CachedRows] = []

    def advance(self, rows: list[GeneratedRow], choose: Choose) -> list[GeneratedRow]:
        """Add one token to each row.

        Args:
            choose: gets the logits, float32 of shape ``(rows, vocabulary)``, and their rows, and
                returns their tokens.

        Returns:
            The rows that have a new token: all of them.
        """
        import torch

        with torch.inference_mode():
            ready, logits = self._computed(rows)
            for row, token in zip(ready, choose(logits, ready), strict=True):
                row.tokens.append(token)
        return rows

    def drop(self, rows: list[GeneratedRow]) -> None:
        """Free the caches of these rows. Those without one are ignored."""
        self._forget([row for row in rows if row.home is not None])

    def _forget(self, rows: list[GeneratedRow]) -> None:
        """Rows without a home leave their batch when it is computed, and with the last one it."""
        for row in rows:
            home, row.home, row.cached = row.home, None, 0
            if isinstance(home, CachedRows) and not any(each.home is home for each in home.rows):
                self._homes.remove(home)

    def _computed(self, rows: list[GeneratedRow]) -> tuple[list[GeneratedRow], Any]:
        import torch

        known = [row for row in rows if row.is_cached]
        new = [row for row in rows if not row.is_cached]
        self._forget([row for row in new if row.home is not None])
        ready: list[GeneratedRow] = []
        logits: list[Any] = []
        try:
            if self.way == "alone":
                new = rows
                for row in rows:
                    if not isinstance(row.home, LoneRow):
                        row.home = LoneRow(self._call, row)
                    logits.append(row.home.forward())
                return rows, torch.cat(logits)
            # New ones first: they need most memory, and while it lacks the others keep theirs.
            begun = []
            for part in self._alike(new):
                home, first = CachedRows.started(self._call, part)
                self._homes.append(home)
                begun.append(home)
                logits.append(first)
                ready += part
            new = rows  # Layers may hold one column more than others do.
            moving = self._moving(known)
            for home in moving:
                logits.append(home.forward())
                ready += home.rows
            self._merge(moving + begun)
            return ready, logits[0] if len(logits) == 1 else torch.cat(logits)
        except BaseException:
            self._forget([row for row in new if row.home is not None])
            raise

    def _moving(self, rows: list[GeneratedRow]) -> list[CachedRows]:
        """Batches of exactly these rows; others stay behind in batches of their own."""
        wanted = set(map(id, rows))
        found = []
        for home in list(self._homes):
            living = [at for at, row in enumerate(home.rows) if row.home is home]
            going = [at for at in living if id(home.rows[at]) in wanted]
            if not going:
                continue
            staying = [at for at in living if id(home.rows[at]) not in wanted]
            if staying:
                self._homes.append(home.part(staying))
            if len(going) < len(home.rows):
                home.keep(going)
            found.append(home)
        return found

    def _merge(self, homes: list[CachedRows]) -> None:
        """Join the batches that may be computed together at the next step."""
        together: dict[Any, list[CachedRows]] = {}
        for home in homes:
            length = home.length if self.way == "aligned" else 0
            together.setdefault((length, home.rows[0].shape), []).append(home)
        for group in together.values():
            if len(group) > 1:
                joined = CachedRows.joined(group)
                self._homes = [home for home in self._homes if home not in group]
                self._homes.append(joined)

    def _alike(self, rows: list[GeneratedRow]) -> list[list[GeneratedRow]]:
        """New rows, in groups that are computed from their tokens together."""
        groups: list[list[GeneratedRow]] = []
        last: Any = None
        longest = width = read = 0

        def order(row: GeneratedRow) -> tuple[Any, ...]:
            # Without padding, the rows of a group have one length. An encoder's input is padded.
            length = 0 if self.way == "padded" else len(row.tokens)
            return row.shape, length, max(len(row.tokens), row.encoded_tokens)

        for row in sorted(rows, key=order):
            *kind, size = order(row)
            width = max(width, len(row.tokens))
            read = max(read, row.encoded_tokens)
            is_full = bool(groups) and (len(groups[-1]) + 1) * (width + read) > _MOST_NEW
            if kind != last or size > longest or is_full:
                groups.append([])
                last, longest = kind, _ALIKE * size
                width, read = len(row.tokens), row.encoded_tokens
            groups[-1].append(row)
        return groups
