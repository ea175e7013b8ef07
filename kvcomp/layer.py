"""`CompressedLayer`: the rows, positions and last queries of one layer; the only state there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcomp import checks, ops
from kvcomp.core import PAD, Compressor, Observed
from kvcomp.counters import Counters
from kvcomp.queries import RecentQueries
from kvcomp.remembered import RememberedQueries
from kvcomp.rotary import Rotary
from kvcomp.storage import RowStorage

RECORDED_QUERIES = 1024
"""Queries held beyond the window while drafts may be rolled back."""
ABANDONED = 64
"""Forwards without a `crop` after which recording is taken to be over, as no drafting works like that."""


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One full-attention layer of a `CompressedCache`.

    Storage holds `budget + interval` rows and is written in place. `update` stores the new rows and returns all of
    them; `observe`, called by the attention function, takes the queries and compresses: at once after a first forward
    longer than the budget, then whenever `budget + interval` rows are reached; with `deferred` the cache calls `settle`
    when every layer has run, so that a fault in one leaves all as they were. A forward with more tokens than there is
    room for gets a larger buffer until that compression. Between `activate_past_recording` and `crop` nothing is
    compressed.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, compressor: Compressor, layer_idx: int, interval: int, seed: int, rotary: Rotary | None):
        self.compressor, self.layer_idx, self.interval, self.seed, self.rotary = (
            compressor, layer_idx, interval, seed, rotary
        )  # fmt: skip
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.count = Counters()
        self.record_past = False
        least = self.compressor.budget if self.compressor.unpacked is None else self.compressor.unpacked
        self.storage = RowStorage(least, self.interval, self.compressor.accumulates)
        self.prompt_end: Tensor | None = None
        self.recent_queries = RecentQueries(self.compressor.window)
        self.remembered = RememberedQueries(self.compressor.remembers, self.rotary)
        self.scaling: float | None = None
        self.waiting = 0  # tokens stored whose queries have not been seen
        self.deferred = False
        self.torn = False  # a compression has begun to write and has not ended
        self.given_positions: Tensor | None = None
        self.given_mask = False
        self.checkpoint: tuple[Counters, Tensor | None] = Counters(), None  # as the running forward began

    # What transformers asks ------------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen: the position of the next token in an unpadded batch."""
        return self.count.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(stored rows + new tokens, evicted rows)`: aligns the newest rows with the queries."""
        return self.storage.rows + query_length, self.count.seen - self.storage.rows

    def get_max_length(self) -> int:
        """-1: there is no longest text."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether there is a buffer."""
        return self.storage.buffer is not None

    @property
    def uses_every_query(self) -> bool:
        """Whether each query must be seen once before it is forgotten."""
        return self.compressor.accumulates or self.compressor.remembers > 0

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self.storage.recent.keys.device

    @property
    def batch_size(self) -> int:
        """Batch rows stored; an AttributeError before there are any, as transformers probes with hasattr."""
        if not self.is_initialized:
            raise AttributeError("batch_size is known after the first update")
        return self.storage.recent.keys.shape[0]

    @property
    def keys(self) -> Tensor | None:
        """View of the stored keys `[batch, kv_heads, rows, head_dim]`, after RoPE; None before the first update."""
        return self.storage.kv.keys if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """View of the stored values; None before the first update."""
        return self.storage.kv.values if self.is_initialized else None

    @property
    def positions(self) -> Tensor | None:
        """True position of each row `[batch, kv_heads, rows]`, -1 for padding; None before the first update."""
        return self.storage.kv.positions if self.is_initialized else None

    @property
    def query_tensors(self) -> list[Tensor]:
        """What holds the recent and the remembered queries."""
        recent = self.recent_queries
        return [held for held in (recent.buffer, recent.buffer_positions) if held is not None] + self.remembered.tensors

    def begin(self, positions: Tensor | None, masked: bool, deferred: bool) -> None:
        """Prepares for a forward: `positions` `[batch, new]` of its tokens if the model was given any; `masked`: it was
        given a mask of rows, not of padding."""
        self.given_positions, self.given_mask, self.deferred = positions, masked, deferred
        self.checkpoint = (replace(self.count), self.prompt_end)

    # Writing ---------------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the buffer, for rows like `key_states` and `value_states`."""
        self.storage.reserve(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new rows and returns every stored row that is not packed or exact, the new ones last.

        The returned keys carry this layer as `kvcomp_layer`, by which the attention function finds it, and the other
        rows.
        """
        new = key_states.shape[2]
        positions = self._new_positions(key_states, kwargs.get("kwargs") or {})
        checks.observed(self)
        checks.batch(self, key_states.shape[0])
        self.storage.append(key_states, value_states, positions)
        self.count.prompt_open &= self.count.seen == 0 or new > 1
        self.count.seen, self.count.fresh = self.count.seen + new, self.count.fresh + new
        if self.count.prompt_open:
            self.prompt_end = positions[:, -1] + 1
        self.waiting = new
        recent = self.storage.recent
        keys, values = recent.keys, recent.values
        keys.kvcomp_layer = self  # type: ignore[attr-defined]
        return keys, values

    def _new_positions(self, key_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        batch, new = key_states.shape[0], key_states.shape[2]
        positions = kwargs.get("position_ids", self.given_positions)
        if positions is None or positions.ndim != 2:
            positions = self.given_positions
        if positions is None:
            positions = torch.arange(self.count.seen, self.count.seen + new, device=key_states.device)[None]
        return positions.to(key_states.device, torch.int32).expand(batch, new)

    # After the attention of a step -----------------------------------------------------------------------------------

    def hide(self, visible: Bool[Tensor, "batch rows"] | None) -> None:
        """Marks the new rows that are padding; `visible` says which of all rows are none (None: all)."""
        if visible is not None and not bool(visible.all()):
            fresh = self.count.fresh  # older rows are marked already
            hidden_on_the_left = (visible.cumsum(-1) == 0)[:, None, -fresh:]
            self.storage.recent.positions[:, :, -fresh:].masked_fill_(hidden_on_the_left, PAD)
            self.count.padded = True

    def observe(self, queries: Float[Tensor, "batch query_heads new head_dim"], scaling: float | None) -> None:
        """Takes the queries of the forward whose rows `update` stored."""
        new, self.scaling = self.waiting, scaling
        if not new:
            raise NotImplementedError(
                f"layer {self.layer_idx} attends twice to the rows of one update, which kvcomp does not support; use "
                "transformers' DynamicCache"
            )
        if self.compressor.window or self.uses_every_query:
            self.recent_queries.spare = self._spare_queries()
            self.recent_queries.append(queries, self.storage.recent.positions[:, 0, -new:])
            self.count.uncounted += new if self.uses_every_query else 0
        self.count.forwards += 1
        self.count.uncropped += 1
        self.waiting = 0
        if not self.deferred:
            self.settle()

    def _spare_queries(self) -> int:
        if self.uses_every_query:
            return 1 << 62
        return RECORDED_QUERIES if self.record_past else self.recent_queries.usual_spare

    def settle(self) -> None:
        """Compresses if enough rows have gathered."""
        if self._recording():
            return
        due = self.due()
        if due and not self.deferred:  # else the cache has checked all layers before the first one changes
            checks.finite(self)
        with torch.inference_mode(False), torch.no_grad():  # else later steps could not use what is made here
            if self.uses_every_query and (due or self.count.uncounted >= self.interval):
                self._accumulate()
            if due:
                self._compress()
        self.recent_queries.trim(self.count.uncounted)

    def due(self) -> bool:
        """Whether `settle` would compress."""
        if self._recording():
            return False
        at_once = self.count.forwards == 1 and self.count.round == 0
        full = [
            rows > least if at_once else rows >= least + self.interval
            for rows, least in (
                (self.storage.rows, self.compressor.budget),
                (self.storage.buffered, self.compressor.unpacked),
            )
            if least is not None
        ]
        return any(full)

    def _recording(self) -> bool:
        return self.record_past and self.count.uncropped > 0

    def _accumulate(self) -> None:
        seen, kv = self.observed(self.count.uncounted), self.storage.kv
        if seen.queries is not None and seen.query_positions is not None:
            if self.compressor.accumulates:
                self.storage.add_mass(ops.attention_mass(kv, seen))
            if self.compressor.remembers:
                self.remembered.add(seen.queries, seen.query_positions, self.storage.recent.keys.shape[1])
        self.count.uncounted = 0

    def observed(self, window: int) -> Observed:
        """What the compressor may know, with at most the last `window` queries."""
        queries = query_positions = None
        if window and self.recent_queries.count:
            queries = self.recent_queries.queries[:, :, -window:]
            query_positions = self.recent_queries.positions[:, -window:]
        return Observed(
            queries, query_positions, self.scaling, self.layer_idx,
            "prefill" if self.count.prompt_open else "decode",
            self.count.round, self.prompt_end, self.count.padded, self.seed, self.rotary,
        )  # fmt: skip

    def _compress(self) -> None:
        seen = replace(
            self.observed(self.compressor.window),
            remembered=self.remembered.queries, remembered_positions=self.remembered.positions,
        )  # fmt: skip
        kept = self.compressor.compress(self.storage.kv, seen)
        if kept.rows > (self.compressor.budget or kept.rows):
            raise ValueError(
                f"{self.compressor!r} kept {kept.rows} rows, more than its budget of {self.compressor.budget}"
            )
        self.torn = True
        self.storage.replace(kept)
        self.torn = False
        self.count.fresh, self.count.round = 0, self.count.round + 1

    # Going back, batch operations ------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Nothing is compressed until the next `crop`, so that drafts can be rolled back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens, then compresses if due. Raises ValueError if that is
        impossible."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the tokens to remove as a negative number, got {tokens_to_remove}")
        tokens = -tokens_to_remove
        checks.crop(self, tokens)
        if not self.is_initialized:
            return
        self.remove(tokens)
        self.count.uncropped = 0
        self.count.prompt_open &= not (self.record_past or tokens)
        if not self.deferred:
            self.settle()

    def remove(self, tokens: int) -> None:
        """Forgets the newest `tokens` tokens; `checks.crop` says whether that is allowed."""
        observed, self.waiting = tokens - self.waiting, 0
        self.count.seen -= tokens
        self.storage.drop(tokens)
        self.count.fresh -= tokens
        self.count.uncounted = max(self.count.uncounted - observed, 0)
        self.recent_queries.drop(observed)
        if self.count.prompt_open and self.storage.rows and self.prompt_end is not None:
            self.prompt_end = self.storage.newest + 1

    def undo(self, tokens: int) -> None:
        """Forgets the `tokens` tokens that a forward has stored which did not end: all is as when it began."""
        self.remove(tokens)
        self.count, self.prompt_end = self.checkpoint

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor of the layer by `change` of it; the batch is always the first axis."""
        with torch.inference_mode(False), torch.no_grad():
            self.storage.map(change)
            self.prompt_end = None if self.prompt_end is None else change(self.prompt_end)
            self.recent_queries.map(change)
            self.remembered.map(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row `i` becomes row `beam_idx[i]`."""
        self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row becomes `repeats` rows."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these batch rows (indices or a bool mask)."""
        rows = torch.as_tensor(indices)
        self.map(lambda tensor: tensor[rows.to(tensor.device)])
