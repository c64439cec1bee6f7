"""A layer of a cache with room for more columns and rows.

transformers' own layer copies everything at each step. Here a step writes its columns, a row that
leaves makes place for the last one, and a row that joins is written behind the others. Everything
is copied only if the room is too small.

    rooms   (capacity of rows, heads, capacity of columns, size of a head), two tensors
    keys    the part of the first that is used: rows from 0 on, columns from ``first`` on
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

#: Columns that a layer is given ahead: at least so many, and this share of what it has. Arbitrary:
#: copying them all once in so many steps is cheap.
_COLUMNS, _SHARE = 64, 8

#: Rows that a layer is given ahead when one joins, as a share of what it has. Arbitrary.
_ROWS_SHARE = 4


@functools.cache
def growing_layer(*, grows: bool = True) -> Any:
    """The class of such layers: transformers is imported only here.

    Args:
        grows: whether it gets columns at each step; those of an encoder do not.
    """
    from transformers.cache_utils import DynamicLayer

    base: Any = DynamicLayer

    class GrowingLayer(base):  # type: ignore[misc, unused-ignore]
        keys: Any
        values: Any
        rooms: Any = None
        first = 0
        #: What was shown of the rooms. Keys that are other ones were not made here.
        shown: Any = None

        @property
        def is_own(self) -> bool:
            """Whether keys and values are in the rooms."""
            return self.rooms is not None and self.shown is self.keys

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            rows, have = len(key_states), self.keys.shape[-2] if self.keys.numel() else 0
            columns = have + key_states.shape[-2]
            if not self.is_own or self.first + columns > self.rooms[0].shape[-2]:
                self._move(rows, columns, have, (key_states, value_states), 0)
            start = self.first + have
            for room, new in zip(self.rooms, (key_states, value_states), strict=True):
                room[:rows, :, start : self.first + columns] = new
            self._show(rows, columns)
            return self.keys, self.values

        def keep(self, order: Sequence[int]) -> None:
            """Rows with these numbers remain: the row ``order[i]`` becomes row ``i``.

            Args:
                order: each number is ``i`` itself, or larger than all ``i``.
            """
            last = self.first + self.keys.shape[-2]
            columns = self.keys.shape[-2]
            for room in self.rooms:
                for to, source in enumerate(order):
                    if to != source:
                        room[to, :, self.first : last] = room[source, :, self.first : last]
            self._show(len(order), columns)

        def add(self, layers: Sequence[Any], columns: int, *, on_the_left: bool) -> None:
            """Append the rows of other layers.

            Args:
                columns: of the result; those that a row lacks are 0.
                on_the_left: where it lacks them.
            """
            rows, have = self.keys.shape[0], self.keys.shape[-2]
            count = rows + sum(len(layer.keys) for layer in layers)
            space = self.rooms[0].shape[-2] - self.first
            lacks = columns - have
            fits = lacks <= (self.first if on_the_left else space - have)
            if len(self.rooms[0]) < count or not fits:
                self._move(rows, columns, have, (self.keys, self.values), count, on_the_left)
            elif on_the_left:
                self.first -= lacks
            end = self.first + columns
            for at, name in enumerate(("keys", "values")):
                room, start = self.rooms[at], rows
                for layer in layers:
                    part = getattr(layer, name)
                    size, gap = len(part), columns - part.shape[-2]
                    low, high = (self.first + gap, end) if on_the_left else (self.first, end - gap)
                    room[start : start + size, :, low:high] = part
                    room[start : start + size, :, self.first : low] = 0
                    room[start : start + size, :, high:end] = 0
                    start += size
            if fits and not on_the_left and lacks:
                for room in self.rooms:
                    room[:rows, :, self.first + have : end] = 0
            self._show(count, columns)

        def drop_columns(self, count: int) -> None:
            """Remove columns on the left."""
            rows, columns = self.keys.shape[0], self.keys.shape[-2] - count
            self.first += count
            self._show(rows, columns)

        def narrow(self, columns: int) -> None:
            """Keep the first columns alone, and free the memory of the others."""
            rows, end = self.keys.shape[0], self.first + columns
            self.rooms = tuple(room[:rows, :, self.first : end].clone() for room in self.rooms)
            self.first = 0
            self._show(rows, columns)

        def _move(
            self,
            rows: int,
            columns: int,
            have: int,
            like: Sequence[Any],
            count: int,
            on_the_left: bool = False,
        ) -> None:
            """Make rooms for so many columns and ``count`` rows, and copy what there is."""
            capacity = max(rows, count + count // _ROWS_SHARE)
            length = columns + (max(_COLUMNS, columns // _SHARE) if grows else 0)
            gap = columns - have if on_the_left else 0
            rooms = []
            for old, new in zip((self.keys, self.values), like, strict=True):
                # Zeros, since what a mask hides may not be infinite.
                room = new.new_zeros(capacity, new.shape[1], length, new.shape[-1])
                if have:
                    room[:rows, :, gap : gap + have] = old
                rooms.append(room)
            self.rooms, self.first = tuple(rooms), 0

        def _show(self, rows: int, columns: int) -> None:
            end = self.first + columns
            self.keys, self.values = (room[:rows, :, self.first : end] for room in self.rooms)
            self.shown = self.keys

    return GrowingLayer
