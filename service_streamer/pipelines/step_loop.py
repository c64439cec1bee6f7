"""Generation step by step, with a cache, for any model of transformers that can generate.

``advance(rows, choose)`` adds one token to each of the rows. They may be others at each step: a row
that is new, or whose cache was lost, is computed from its tokens; one that is left out keeps its
cache until it comes again or is dropped. A step computes about ``most_new`` tokens of new rows at
most. The other new rows wait for a later step. How rows share a forward pass depends on the model:

"padded"     rows of any lengths together, padded on the left
"shifted"    the same, for models that count positions from the padding on (``position_table``)
"aligned"    rows of the same length together, if that does not help
"alone"      each row by itself, as ``model.generate`` does it, for caches that cannot be joined

``suitable_loop`` finds the first of them that computes what the model computes without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

from .cached_rows import CachedRows, GeneratedRow, LoneRow, ModelCall

Way = Literal["padded", "shifted", "aligned", "alone"]
Choose = Callable[[Any, "list[GeneratedRow]"], list[int]]

#: Rows whose lengths differ more are computed from their tokens in several passes: otherwise most
#: of a pass may be padding.
_ALIKE = 2


class StepLoop:
    """Adds a token to each of many rows at a time. Belongs to one thread.

    Args:
        model: a model of transformers that can generate, on its device, in ``eval`` mode.
        way: how rows share a forward pass.
        most_new: tokens of new rows that one step computes, padding and those that an encoder
            reads included: at most so many, or the oldest row and half as many. This bounds the
            memory of the step, and how long running rows, cancellations, deadlines and signs of
            life wait. The default is arbitrary: about a second.

    Attributes:
        homes: the batches of rows that have a cache.
    """

    def __init__(self, model: Any, way: Way = "padded", *, most_new: int = 1024) -> None:
        self.way = way
        self._most_new = most_new
        self._call = ModelCall(model, shifts=way == "shifted")
        self.homes: list[CachedRows] = []
        #: Tokens that the encoder gives for features of each shape, once they are known.
        self._encoded_tokens: dict[tuple[int, ...], int] = {}

    def advance(self, rows: list[GeneratedRow], choose: Choose) -> list[GeneratedRow]:
        """Add one token to each row, except to new rows that have to wait.

        Args:
            rows: the oldest first. The first new row never waits.
            choose: gets the logits, float32 of shape ``(rows, vocabulary)``, and their rows, and
                returns their tokens.

        Returns:
            The rows that have a new token, in any order.
        """
        import torch

        with torch.inference_mode():
            ready, logits = self._computed(rows)
            for row, token in zip(ready, choose(logits, ready), strict=True):
                row.tokens.append(token)
        return ready

    def drop(self, rows: list[GeneratedRow]) -> None:
        """Free the caches of these rows. Those without one are ignored."""
        self._forget([row for row in rows if row.home is not None])

    def _forget(self, rows: list[GeneratedRow]) -> None:
        """Rows without a home leave their batch when it is computed, and with the last one it."""
        for row in rows:
            home, row.home, row.cached = row.home, None, 0
            if isinstance(home, CachedRows) and not any(each.home is home for each in home.rows):
                self.homes.remove(home)

    def _computed(self, rows: list[GeneratedRow]) -> tuple[list[GeneratedRow], Any]:
        import torch

        known = [row for row in rows if row.is_cached]
        waiting = [row for row in rows if not row.is_cached]
        self._forget([row for row in waiting if row.home is not None])
        new = self._next(waiting)
        ready: list[GeneratedRow] = []
        logits: list[Any] = []
        try:
            if self.way == "alone":
                ready, new = [*new, *known], rows
                for row in ready:
                    if not isinstance(row.home, LoneRow):
                        row.home = LoneRow(self._call, row)
                        self._encoded_tokens[row.shape] = row.encoded_tokens
                    logits.append(row.home.forward())
                return ready, torch.cat(logits)
            # New ones first: they need most memory, and while it lacks the others keep theirs.
            begun = []
            for part in self._alike(new):
                home, first = CachedRows.started(self._call, part)
                self.homes.append(home)
                begun.append(home)
                self._encoded_tokens[part[0].shape] = part[0].encoded_tokens
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
        for home in list(self.homes):
            living = [at for at, row in enumerate(home.rows) if row.home is home]
            going = [at for at in living if id(home.rows[at]) in wanted]
            if not going:
                continue
            staying = [at for at in living if id(home.rows[at]) not in wanted]
            if staying:
                self.homes.append(home.part(staying))
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
                self.homes = [home for home in self.homes if home not in group]
                self.homes.append(joined)

    def _next(self, waiting: list[GeneratedRow]) -> list[GeneratedRow]:
        """Choose the new rows that this step computes: the oldest, and others that fit."""
        if not waiting:
            return []
        oldest, *others = waiting
        # The oldest counts for half at most: short rows do not wait until all long ones are over.
        tokens = self._new_tokens(oldest)
        most = self._most_new + max(0, tokens - self._most_new // 2)
        # Rows of one prompt are computed once, unless each row is alone.
        origin: Callable[[GeneratedRow], int] = id
        if self.way != "alone":
            origin = attrgetter("origin")
        chosen = {origin(oldest): oldest}
        for row in others:
            total = tokens + self._new_tokens(row)
            if total > most or origin(row) in chosen:  # the usual case where many wait
                continue
            if self._padded_tokens([*chosen.values(), row]) <= most:
                chosen[origin(row)], tokens = row, total
        return [row for row in waiting if origin(row) in chosen]

    def _new_tokens(self, row: GeneratedRow) -> int:
        """Tokens that are computed to begin with this row."""
        if row.encoder_output is not None:
            return len(row.tokens)
        return len(row.tokens) + (row.encoded_tokens or self._encoded_tokens.get(row.shape, 0))

    def _padded_tokens(self, rows: list[GeneratedRow]) -> int:
        """Tokens that are computed to begin with these rows, padding included."""
        groups = self._alike(rows)
        return sum(len(group) * max(map(self._new_tokens, group)) for group in groups)

    def _alike(self, rows: list[GeneratedRow]) -> list[list[GeneratedRow]]:
        """New rows, in groups that are computed from their tokens together."""
        groups: list[list[GeneratedRow]] = []
        last: Any = None
        longest = 0

        def order(row: GeneratedRow) -> tuple[Any, ...]:
            # Without padding, the rows of a group have one length. An encoder's input is padded.
            length = 0 if self.way == "padded" else len(row.tokens)
            return row.shape, length, max(len(row.tokens), row.encoded_tokens)

        for row in sorted(rows, key=order):
            *kind, size = order(row)
            if kind != last or size > longest:
                groups.append([])
                last, longest = kind, _ALIKE * size
            groups[-1].append(row)
        return groups
