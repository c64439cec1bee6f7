"""Rows of texts that are generated, and their caches.

A row belongs to a batch of rows whose caches are one tensor for each layer, or it is alone.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .cache_joining import CannotJoin, check_joins, join, keep, narrow, new_cache, select, trim
from .row_sampling import Sampling, TokenCounts

#: Share of the columns of what an encoder has given that may be padding: to remove them copies the
#: rest. Arbitrary.
_SPARE = 0.25


class ModelCall:
    """How a model is called.

    Args:
        model: a model of transformers that can generate.
        shifts: whether each row's position is given to a decoder that is told none.

    Attributes:
        is_pair: whether it has an encoder and a decoder.
        table: of positions; None if it is told them, or counts them itself.
        takes_positions: whether it is told the positions of tokens.
        hands_positions: whether it hands them to its decoder.
        options: of each call.
    """

    def __init__(self, model: Any, *, shifts: bool = False) -> None:
        self.model = model
        self.table = PositionTable(model) if shifts else None
        self.is_pair = bool(model.config.is_encoder_decoder)
        names = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in names and not self.is_pair
        decoder: Any = getattr(model, "decoder", None)  # of two models that were put together
        self.hands_positions = (
            self.is_pair
            and decoder is not None
            and "position_ids" in inspect.signature(decoder.forward).parameters
        )
        self.options: dict[str, Any] = {"use_cache": True}
        if model._supports_logits_to_keep():
            self.options["logits_to_keep"] = 1


class GeneratedRow:
    """One text that is being generated.

    Args:
        prompt: its tokens; of an encoder-decoder model those that the decoder starts with. Rows
            that share the list also share its computation.
        sampling: how its tokens are chosen.
        seed: of its random numbers; None for any.
        encoded: of an encoder-decoder model, the tokens or features that the encoder reads, without
            the dimension of the batch.

        encoder_output: what the encoder gives for ``encoded``, if that is known already.

    Attributes:
        tokens: the prompt's and those that were added.
        encoded_tokens: how many the cache holds of what the encoder has given; 0 if that is not
            known yet.
        encoder_output: as above, until the row is in a cache.
    """

    __slots__ = (
        "cached",
        "counts",
        "encoded",
        "encoded_tokens",
        "encoder_output",
        "home",
        "prompt",
        "random",
        "sampling",
        "tokens",
    )

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling | None = None,
        seed: int | None = None,
        encoded: Any = None,
        encoder_output: Any = None,
    ) -> None:
        self.prompt = prompt
        self.tokens = list(prompt)
        self.sampling = sampling or Sampling()
        self.random = random.Random(seed)
        self.counts = TokenCounts(len(prompt))
        self.encoded = encoded
        self.encoder_output = encoder_output
        is_text = isinstance(encoded, (list, tuple))
        self.encoded_tokens = len(encoded) if is_text else 0
        #: The batch that has its cache, and for how many tokens. Its loop's.
        self.home: CachedRows | LoneRow | None = None
        self.cached = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of features that an encoder reads, which have no padding; () for tokens, or nothing."""
        return tuple(getattr(self.encoded, "shape", ()))

    @property
    def origin(self) -> int:
        """Equal for rows that share their computation, as long as no token was added to them."""
        return id(self.prompt) if len(self.tokens) == len(self.prompt) else id(self)

    @property
    def is_cached(self) -> bool:
        """Whether all its tokens but the last are in a cache."""
        return self.home is not None and self.cached == len(self.tokens) - 1


class CachedRows:
    """Rows whose cache is one tensor for each layer; padded on the left to one length.

    Attributes:
        length: number of its columns.
    """

    def __init__(self, call: ModelCall, rows: list[GeneratedRow], cache: Any, length: int) -> None:
        self.call = call
        self.rows = rows
        self.cache = cache
        self.length = length
        self.ids: Any = None
        self.mask: Any = None
        self.encoded: Any = None
        self.encoded_mask: Any = None

    @classmethod
    def started(cls, call: ModelCall, rows: list[GeneratedRow]) -> tuple[CachedRows, Any]:
        """Compute rows from their tokens: a batch, and the logits of the rows."""
        import torch

        places: dict[int, int] = {}
        distinct: list[GeneratedRow] = []
        copies = []
        for row in rows:
            if row.origin not in places:
                places[row.origin] = len(distinct)
                distinct.append(row)
            copies.append(places[row.origin])
        length = max(len(row.tokens) for row in distinct)
        home = cls(call, distinct, new_cache(call.model), 0)
        device = call.model.device
        lacking = [length - len(row.tokens) for row in distinct]
        filled = [
            [_padding(row)] * gap + row.tokens for row, gap in zip(distinct, lacking, strict=True)
        ]
        masks = [[0] * gap + [1] * (length - gap) for gap in lacking]
        home.ids = torch.tensor(filled, device=device)
        home.mask = torch.tensor(masks, device=device)
        if call.is_pair:
            home._encode(device)
        logits = home._run(length)
        check_joins(home.cache)
        if call.is_pair:
            # The cache has all that comes of it. What is handed on has its shape alone.
            for row in rows:
                row.encoded_tokens = row.encoded_tokens or home.encoded.shape[1]
                row.encoder_output = None
            home.encoded = home.encoded.new_zeros(1, 1, home.encoded.shape[-1])
        if len(distinct) < len(rows):
            chosen = torch.tensor(copies, device=device)
            home._choose(chosen)
            logits = logits.index_select(0, chosen)
        home.rows = rows
        for row in rows:
            row.home, row.cached = home, len(row.tokens)
        return home, logits

    def forward(self) -> Any:
        """Compute the last token of each row: their logits."""
        import torch

        last = [[row.tokens[-1]] for row in self.rows]
        self.ids = torch.cat([self.ids, torch.tensor(last, device=self.ids.device)], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(last), 1)], dim=1)
        logits = self._run(1)
        for row in self.rows:
            row.cached += 1
        return logits

    def part(self, places: list[int]) -> CachedRows:
        """A batch of these rows alone."""
        import torch

        rows = [self.rows[at] for at in places]
        home = CachedRows(self.call, rows, self.cache, self.length)
        home.ids, home.mask = self.ids, self.mask
        home.encoded, home.encoded_mask = self.encoded, self.encoded_mask
        home._choose(torch.tensor(places, device=self.ids.device))
        for row in rows:
            row.home = home
        home._trim()
        return home

    def keep(self, places: list[int]) -> None:
        """Let all other rows go. The order of those that remain may change."""
        import torch

        count, kept = len(places), set(places)
        moving = [at for at in places if at >= count]
        order = [at if at in kept else moving.pop() for at in range(count)]
        chosen = torch.tensor(order, device=self.ids.device)
        keep(self.cache, order, chosen)
        self._choose_inputs(chosen)
        self.rows = [self.rows[at] for at in order]
        self._trim()

    def _trim(self) -> None:
        """Remove the columns that are padding in each row."""
        columns = self.length - max(row.cached for row in self.rows)
        if columns > 0:
            trim(self.cache, columns)
            self.ids, self.mask = self.ids[:, columns:], self.mask[:, columns:]
            self.length -= columns
        if self.encoded_mask is None:
            return
        have, most = self.encoded_mask.shape[1], max(row.encoded_tokens for row in self.rows)
        if most <= have * (1 - _SPARE):
            narrow(self.cache, most)
            self.encoded_mask = self.encoded_mask[:, :most]

    @classmethod
    def joined(cls, parts: list[CachedRows]) -> CachedRows:
        """One batch of several, which must not be used any more."""
        import torch

        # The largest one has most to copy, unless the others find room in it.
        parts = sorted(parts, key=lambda part: -len(part.rows))
        lengths = [part.length for part in parts]
        longest = max(lengths)
        cache = join([part.cache for part in parts], lengths)
        home = cls(parts[0].call, [row for part in parts for row in part.rows], cache, longest)
        pad = torch.nn.functional.pad
        home.ids = torch.cat(
            [
                pad(part.ids, (longest - part.length, 0), value=_padding(part.rows[0]))
                for part in parts
            ]
        )
        home.mask = torch.cat([pad(part.mask, (longest - part.length, 0)) for part in parts])
        if parts[0].encoded is not None:
            home.encoded = parts[0].encoded
            masks = [part.encoded_mask for part in parts]
            most = max(mask.shape[1] for mask in masks)
            home.encoded_mask = torch.cat([pad(mask, (0, most - mask.shape[1])) for mask in masks])
        for row in home.rows:
            row.home = home
        return home

    def _choose(self, places: Any) -> None:
        self.cache = select(self.cache, places)
        self._choose_inputs(places)

    def _choose_inputs(self, places: Any) -> None:
        for name in ("ids", "mask", "encoded_mask"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, places))

    def _encode(self, device: Any) -> None:
        """Run the encoder. Tokens are padded on the right; features all have one shape."""
        import torch

        inputs = [torch.as_tensor(row.encoded, device=device) for row in self.rows]
        model = self.call.model
        if inputs[0].is_floating_point():
            outputs = [row.encoder_output for row in self.rows]
            if unread := [at for at, output in enumerate(outputs) if output is None]:
                features = torch.stack([inputs[at] for at in unread]).to(model.dtype)
                read = model.get_encoder()(features).last_hidden_state
                for at, output in zip(unread, read, strict=True):
                    outputs[at] = output
            self.encoded = torch.stack(outputs)
            self.encoded_mask = torch.ones(self.encoded.shape[:2], dtype=torch.long, device=device)
            return
        most = max(map(len, inputs))
        pad = torch.nn.functional.pad
        ids = torch.stack([pad(each, (0, most - len(each))) for each in inputs])
        mask = torch.stack([pad(torch.ones_like(each), (0, most - len(each))) for each in inputs])
        self.encoded = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
        self.encoded_mask = mask

    def _run(self, count: int) -> Any:
        """The logits behind the last column, computing ``count`` columns."""
        from transformers.modeling_outputs import BaseModelOutput

        call = self.call
        options = dict(call.options)
        # Without padding there is no mask, as in model.generate: that takes a faster kernel.
        is_padded = any(len(row.tokens) < self.ids.shape[1] for row in self.rows)
        mask = self.mask if is_padded else None
        if call.is_pair:
            encoded = self.encoded.expand(*self.encoded_mask.shape, -1)
            options["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
            options["decoder_attention_mask"] = mask
            mask = self.encoded_mask
        if call.takes_positions or call.hands_positions:
            name = "position_ids" if call.takes_positions else "decoder_position_ids"
            positions = self.mask.cumsum(-1) - 1
            options[name] = positions.clamp(min=0)[:, -count:]
        inputs = call.model.prepare_inputs_for_generation(
            self.ids,
            next_sequence_length=count,
            past_key_values=self.cache,
            attention_mask=mask,
            is_first_iteration=self.length == 0,
            **options,
        )
        shifted: Any = contextlib.nullcontext()
        if call.table is not None and count == 1:
            shifted = call.table.of([len(row.tokens) - 1 for row in self.rows])
        with shifted:
            logits = call.model(**inputs, return_dict=True).logits
        self.length = self.ids.shape[1]
        return logits[:, -1].float()


class LoneRow:
    """A row whose cache the model makes: the loop of ``model.generate``, one step at a time."""

    def __init__(self, call: ModelCall, row: GeneratedRow) -> None:
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        self.call = call
        self.row = row
        self.kept: dict[str, Any] = dict(call.options)
        with contextlib.suppress(CannotJoin):  # else the model makes one in its first pass
            self.kept["past_key_values"] = new_cache(call.model)
        device = call.model.device
        if call.is_pair:
            encoded = torch.as_tensor(row.encoded, device=device)[None]
            if encoded.is_floating_point():
                encoded = encoded.to(call.model.dtype)
            if row.encoder_output is None:
                found = call.model.get_encoder()(encoded, return_dict=True)
            else:
                found = BaseModelOutput(last_hidden_state=row.encoder_output[None])
            row.encoded_tokens = row.encoded_tokens or found.last_hidden_state.shape[1]
            row.encoder_output = None
            self.kept["encoder_outputs"] = found
        elif call.takes_positions:
            self.kept["position_ids"] = torch.arange(len(row.tokens), device=device)[None]

    def forward(self) -> Any:
        """The logits behind the row's last token."""
        import torch

        model, row = self.call.model, self.row
        ids = torch.tensor([row.tokens], device=model.device)
        is_first = row.cached == 0
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=None if is_first else 1,
            is_first_iteration=is_first,
            **self.kept,
        )
        outputs = model(**inputs, return_dict=True)
        self.kept = model._update_model_kwargs_for_generation(
            outputs, self.kept, is_encoder_decoder=self.call.is_pair
        )
        row.cached = len(row.tokens)
        return outputs.logits[:, -1].float()


def _padding(row: GeneratedRow) -> int:
    """A token to pad with: any will do, since the mask hides it."""
    return row.tokens[0]


_MODULE, _COLUMNS = "embed_positions", "past_key_values_length"

#: Positions for which there is room at first. Arbitrary.
_ROOM = 64


class PositionTable:
    """What a decoder's embedding gives at each position, once it was asked for.

    BART, Marian, NLLB and their kin are told no positions: each token's is its column, padding or
    not. So what their embedding of positions gives is replaced, for one token of each row, by what
    it gives at the row's own position.

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
