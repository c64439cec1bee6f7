"""The caches of a model's attention, joined, split and shortened along their rows.

A batch is padded on the left: its rows end in the same column. A layer keeps all columns, or those
of its sliding window only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class CannotJoin(TypeError):
    """The model's cache is of a kind whose rows cannot be moved to another batch."""


def new_cache(model: Any) -> Any:
    """An empty cache, as ``model.generate`` makes it.

    Raises:
        CannotJoin: the model makes its own, in a form of its own.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    is_usual = getattr(model, "_supports_default_dynamic_cache", None)
    if is_usual is None or not is_usual() or "mamba" in type(model).__name__.lower():
        raise CannotJoin(f"{type(model).__name__} makes a cache of its own")
    config = model.config.get_text_config(decoder=True)
    cache = _with_room(DynamicCache(config=config), growing_layer())
    if model.config.is_encoder_decoder:
        encoded = _with_room(DynamicCache(config=config), growing_layer(grows=False))
        return EncoderDecoderCache(cache, encoded)
    return cache


def _with_room(cache: Any, layer_class: Any) -> Any:
    from transformers.cache_utils import DynamicLayer

    if cache.layer_class_to_replicate is DynamicLayer:  # one for each layer that asks for it
        cache.layer_class_to_replicate = layer_class
    cache.layers = [
        layer_class() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def check_joins(cache: Any) -> None:
    """Raises CannotJoin: a layer is of another kind than the ones known here."""
    from transformers import EncoderDecoderCache
    from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

    if isinstance(cache, EncoderDecoderCache):
        check_joins(cache.self_attention_cache)
        check_joins(cache.cross_attention_cache)
        return
    for layer in getattr(cache, "layers", (cache,)):
        known = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
        ours = (growing_layer(), growing_layer(grows=False))
        if type(layer) not in known + ours:
            raise CannotJoin(f"a cache with a {type(layer).__name__}")


def join(caches: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One cache for the rows of several; they must not be used any more.

    Args:
        lengths: number of columns of each. Shorter ones are padded on the left.
    """
    first = caches[0]
    if len(caches) == 1:
        return first
    if _is_pair(first):
        join([each.self_attention_cache for each in caches], lengths)
        _join_encoded([each.cross_attention_cache for each in caches])
        return first
    longest = max(lengths)
    for layers in zip(*(each.layers for each in caches), strict=True):
        if not _is_used(layers[0]):
            continue
        columns = longest
        if layers[0].is_sliding:
            columns = min(longest, layers[0].sliding_window - 1)
            layers[0].cumulative_length = longest
        _concatenate(layers, columns, on_the_left=True)
    return first


def _join_encoded(caches: Sequence[Any]) -> None:
    """Join what the encoder has given, which is padded on the right."""
    for layers in zip(*(each.layers for each in caches), strict=True):
        if _is_used(layers[0]):
            columns = max(layer.keys.shape[-2] for layer in layers)
            _concatenate(layers, columns, on_the_left=False)
            if layers[0].is_sliding:
                layers[0].cumulative_length = columns


def _concatenate(layers: Sequence[Any], columns: int, *, on_the_left: bool) -> None:
    if getattr(layers[0], "is_own", False):
        layers[0].add(layers[1:], columns, on_the_left=on_the_left)
        return
    for name in ("keys", "values"):
        parts = [getattr(layer, name) for layer in layers]
        shape = (sum(len(part) for part in parts), parts[0].shape[1], columns, parts[0].shape[-1])
        whole = parts[0].new_zeros(shape)
        start = 0
        for part in parts:
            rows, count = whole[start : start + len(part)], part.shape[-2]
            place = rows[:, :, columns - count :] if on_the_left else rows[:, :, :count]
            place.copy_(part)
            start += len(part)
        setattr(layers[0], name, whole)


def select(cache: Any, rows: Any) -> Any:
    """A cache with these rows of another one, in this order; a row may come several times.

    Args:
        rows: their numbers, as a tensor on the model's device.
    """
    import copy

    if _is_pair(cache):
        pair = copy.copy(cache)
        pair.self_attention_cache = select(cache.self_attention_cache, rows)
        pair.cross_attention_cache = select(cache.cross_attention_cache, rows)
        pair.is_updated = dict(cache.is_updated)
        return pair
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        if _is_used(layer):
            layer.rooms = layer.shown = None
            chosen_rows = rows.to(layer.keys.device)  # layers may be on several GPUs
            layer.keys = layer.keys.index_select(0, chosen_rows)
            layer.values = layer.values.index_select(0, chosen_rows)
    return chosen


def keep(cache: Any, order: Sequence[int], rows: Any) -> None:
    """Rows of a cache leave it; those that remain are moved together.

    Args:
        order: the old number of each row that remains, by its new number. That is the same, or
            larger than all new ones.
        rows: the same as a tensor on the model's device.
    """
    if _is_pair(cache):
        keep(cache.self_attention_cache, order, rows)
        keep(cache.cross_attention_cache, order, rows)
        return
    for layer in cache.layers:
        if not _is_used(layer):
            continue
        if getattr(layer, "is_own", False):
            layer.keep(order)
        else:
            chosen_rows = rows.to(layer.keys.device)
            layer.keys = layer.keys.index_select(0, chosen_rows)
            layer.values = layer.values.index_select(0, chosen_rows)


def trim(cache: Any, columns: int) -> None:
    """Remove columns on the left that are padding in every row."""
    if _is_pair(cache):
        trim(cache.self_attention_cache, columns)
        return
    for layer in cache.layers:
        if not _is_used(layer):
            continue
        if getattr(layer, "is_own", False):
            layer.drop_columns(columns)
            continue
        have = layer.keys.shape[-2]
        remain = have - columns
        if layer.is_sliding:
            layer.cumulative_length -= columns
            remain = min(have, layer.cumulative_length)
        layer.keys = layer.keys[..., have - remain :, :]
        layer.values = layer.values[..., have - remain :, :]


def narrow(cache: Any, columns: int) -> None:
    """Keep the first columns alone of what an encoder has given, and free the memory of others."""
    for layer in cache.cross_attention_cache.layers:
        if not _is_used(layer):
            continue
        if getattr(layer, "is_own", False):
            layer.narrow(columns)
            continue
        layer.keys = layer.keys[..., :columns, :].clone()
        layer.values = layer.values[..., :columns, :].clone()
        if layer.is_sliding:
            layer.cumulative_length = columns


def _is_pair(cache: Any) -> bool:
    return hasattr(cache, "cross_attention_cache")


def _is_used(layer: Any) -> bool:
    """Layers that share another one's keys and values have none of their own."""
    return getattr(layer, "keys", None) is not None


# -- layers of a cache with room for more columns and rows
#
# transformers' own layer copies everything at each step. Here a step writes its columns, a row that
# leaves makes place for the last one, and a row that joins is written behind the others. Everything
# is copied only if the room is too small.
#
#     rooms   (capacity of rows, heads, capacity of columns, size of a head), two tensors
#     keys    the part of the first that is used: rows from 0 on, columns from ``first`` on


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
