"""Positions of rows whose lengths differ, for decoders that count them from the first column on.

BART, Marian, NLLB and their kin are told no positions: each token's is its column, padding or not.
So what their embedding of positions gives is replaced, for one token of each row, by what it gives
at the row's own position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .cache_joining import CannotJoin

_MODULE, _COLUMNS = "embed_positions", "past_key_values_length"

#: Positions for which there is room at first. Arbitrary.
_ROOM = 64


class PositionTable:
    """What a decoder's embedding gives at each position, once it was asked for.

    Args:
        model: a model of transformers with a decoder.

    Raises:
        CannotJoin: it has no such embedding, or several.
    """

    def __init__(self, model: Any) -> None:
        modules = dict(model.get_decoder().named_modules())
        found = [module for name, module in modules.items() if name.split(".")[-1] == _MODULE]
        if len(found) != 1 or _COLUMNS not in inspect.signature(found[0].forward).parameters:
            raise CannotJoin(f"{type(model).__name__} has no embedding of positions")
        self._module = found[0]
        self._signature = inspect.signature(self._module.forward)
        self._table: Any = None
        self._known: set[int] = set()

    @contextmanager
    def of(self, positions: Sequence[int]) -> Iterator[None]:
        """While the model computes one token of each row, these are the rows' positions."""

        def replace(_module: Any, args: Any, options: Any, usual: Any) -> Any:
            import torch

            for position in set(positions) - self._known:
                self._add(position, self._signature.bind(*args, **options).arguments, usual)
            places = torch.tensor(positions, device=self._table.device)
            return self._table.index_select(0, places)[:, None]

        with self._module.register_forward_hook(replace, with_kwargs=True):
            yield

    def _add(self, position: int, options: dict[str, Any], usual: Any) -> None:
        import torch

        options = dict(options)
        for name, value in options.items():
            if isinstance(value, (tuple, torch.Size)):
                options[name] = torch.Size((1, 1))
            elif torch.is_tensor(value) and value.dim() > 1:
                options[name] = value[:1]
        options[_COLUMNS] = position
        if options.get("position_ids") is not None:
            options["position_ids"] = torch.tensor([position], device=usual.device)
        found = self._module.forward(**options).reshape(-1)
        if self._table is None or position >= len(self._table):
            table = usual.new_zeros(max(_ROOM, 2 * position), len(found))
            if self._table is not None:
                table[: len(self._table)] = self._table
            self._table = table
        self._table[position] = found
        self._known.add(position)
