"""`CompressedLayer`: the rows, positions and last queries of one layer; the only state there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcomp import ops
from kvcomp.core import KV, PAD, Compressor, Observed
from kvcomp.queries import RecentQueries
from kvcomp.rotary import Rotary

RECORDED_QUERIES = 1024
"""Queries held beyond the window while drafts may be rolled back."""
ABANDONED = 256
"""Forwards without a `crop` after which recording is taken to be over, as no drafting works like that."""


@dataclass
class Counters:
    """The integers of a layer: they travel with its tensors when it is saved."""

    seen: int = 0
    """Tokens seen, padding included."""
    rows: int = 0
    """Rows stored."""
    fresh: int = 0
    """Of these, rows added since the last compression."""
    round: int = 0
    """Compressions so far."""
    uncounted: int = 0
    """Newest queries that `mass` does not include yet."""
    prompt_open: bool = True
    """Whether the next multi-token forward still belongs to the prompt."""
    padded: bool = False
    """Whether some stored row or recent query may be padding."""
    uncropped: int = 0
    """Forwards since the last `crop`."""


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
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.count = Counters()
        self.storage: KV | None = None
        self.prompt_end: Tensor | None = None
        self.recent_queries = RecentQueries(self.compressor.window)
        self.scaling: float | None = None
        self.waiting = 0
        self.deferred = False

    # What transformers asks ------------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen: the position of the next token in an unpadded batch."""
        return self.count.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(stored rows + new tokens, evicted rows)`: aligns the newest rows with the queries."""
        return self.count.rows + query_length, self.count.seen - self.count.rows

    def get_max_length(self) -> int:
        """-1: there is no longest text."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether storage exists."""
        return self.storage is not None

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self._storage.keys.device

    @property
    def batch_size(self) -> int:
        """Batch rows stored; an AttributeError before there are any, as transformers probes with hasattr."""
        if self.storage is None:
            raise AttributeError("batch_size is known after the first update")
        return self.storage.keys.shape[0]

    @property
    def keys(self) -> Tensor | None:
        """View of the stored keys `[batch, kv_heads, rows, head_dim]`, after RoPE; None before the first update."""
        return None if self.storage is None else self.kv.keys

    @property
    def values(self) -> Tensor | None:
        """View of the stored values; None before the first update."""
        return None if self.storage is None else self.kv.values

    @property
    def positions(self) -> Tensor | None:
        """True RoPE position of each stored row `[batch, kv_heads, rows]`, -1 for padding; None before the first
        update."""
        return None if self.storage is None else self.kv.positions

    @property
    def kv(self) -> KV:
        """View of the stored rows."""
        return self._storage.newest(self._storage.rows - self.count.rows)

    @property
    def _storage(self) -> KV:
        assert self.storage is not None, "no update yet"
        return self.storage

    # Writing ---------------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates storage for `budget + interval` rows like `key_states` and `value_states`."""
        self.storage = self._allocate(key_states, value_states, self.capacity(0))

    def capacity(self, rows: int) -> int:
        """Rows of storage wanted for `rows` rows: `budget + interval`, or amortised growth without a budget."""
        budget = self.compressor.budget
        if budget is None:
            return rows + max(self.interval, rows // 8)
        return max(rows, budget + self.interval)

    def _allocate(self, keys: Tensor, values: Tensor, rows: int) -> KV:
        batch, heads = keys.shape[:2]
        positions = torch.empty(batch, heads, rows, dtype=torch.int32, device=keys.device)
        mass = positions.new_zeros(positions.shape, dtype=torch.float32) if self.compressor.accumulates else None
        return KV(
            keys.new_empty(batch, heads, rows, keys.shape[-1]),
            values.new_empty(batch, heads, rows, values.shape[-1]),
            positions, mass,
        )  # fmt: skip

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new rows and returns every stored row, the new ones last.

        The returned keys carry this layer as `kvcomp_layer`, by which the attention function finds it.
        """
        new = key_states.shape[2]
        positions = self._new_positions(key_states, kwargs.get("kwargs") or {})
        self.check_update(key_states.shape[0])
        self._make_room(key_states, value_states)
        start, stop = self.count.rows, self.count.rows + new
        self._storage.keys[:, :, start:stop] = key_states.detach()
        self._storage.values[:, :, start:stop] = value_states.detach()
        self._storage.positions[:, :, start:stop] = positions[:, None]
        if self._storage.mass is not None:
            self._storage.mass[:, :, start:stop] = 0.0
        first = self.count.seen == 0
        self.count.prompt_open &= first or new > 1
        self.count.rows, self.count.seen, self.count.fresh = stop, self.count.seen + new, self.count.fresh + new
        if self.count.prompt_open:
            self.prompt_end = positions[:, -1] + 1
        self.waiting = new
        keys, values = self.kv.keys, self.kv.values
        keys.kvcomp_layer = self  # type: ignore[attr-defined]
        return keys, values

    def _new_positions(self, key_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        batch, new = key_states.shape[0], key_states.shape[2]
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(self.count.seen, self.count.seen + new)[None]
        return positions.to(key_states.device, torch.int32).expand(batch, new)

    def check_update(self, batch: int) -> None:
        """Raises ValueError for rows that do not fit what is stored; nothing is written before."""
        if self.waiting:
            raise ValueError(
                f"layer {self.layer_idx} stored {self.waiting} tokens, but its attention function never saw them: the "
                "model no "
                "longer runs kvcomp's attention. Build the CompressedCache after the last set_attn_implementation()"
            )
        if self.storage is not None and batch != self.batch_size:
            raise ValueError(
                f"the cache holds a batch of {self.batch_size}, got {batch}: call cache.batch_repeat_interleave(n) or "
                "cache.batch_select_indices(rows) first, or cache.reset() for another text"
            )

    def check_prompt(self, newest: Tensor, new: int) -> None:
        """Raises ValueError if a forward of `new` tokens, the last at `newest` `[batch]`, makes the prompt too long."""
        if self.count.prompt_open and (self.count.seen == 0 or new > 1):
            self.compressor.check_prompt(min(int(newest.max()) + 1, self.count.seen + new))

    def _make_room(self, keys: Tensor, values: Tensor) -> None:
        rows = self.count.rows + keys.shape[2]
        if self.storage is not None and rows <= self.storage.rows:
            return
        larger = self._allocate(keys, values, self.capacity(rows))
        if self.storage is not None:
            self._write(larger, self.kv)
        self.storage = larger

    def _write(self, storage: KV, kv: KV) -> None:
        """Copies `kv` to the front of `storage`."""
        for target, source in zip(_tensors(storage), _tensors(kv), strict=True):
            shared = target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            target[:, :, : kv.rows] = source.clone() if shared else source

    # After the attention of a step -----------------------------------------------------------------------------------

    def observe(
        self,
        queries: Float[Tensor, "batch query_heads new head_dim"],
        visible: Bool[Tensor, "batch rows"] | None,
        scaling: float | None,
    ) -> None:
        """Takes the queries of the forward that `update` stored; `visible` says which rows are no padding (None:
        all)."""
        new, self.scaling = self.waiting, scaling
        positions = self.kv.positions
        if visible is not None and not bool(visible.all()):
            positions.masked_fill_(~visible[:, None], PAD)
            self.count.padded = True
        if self.compressor.window or self.compressor.accumulates:
            self.recent_queries.spare = self._spare_queries()
            self.recent_queries.append(queries, positions[:, 0, -new:])
            self.count.uncounted += new if self.compressor.accumulates else 0
        self.count.uncropped += 1
        self.record_past &= self.count.uncropped <= ABANDONED
        if not self.deferred:
            self.settle()
        self.waiting = 0

    def _spare_queries(self) -> int:
        if self.compressor.accumulates:
            return 1 << 62
        return RECORDED_QUERIES if self.record_past else self.recent_queries.usual_spare

    def settle(self) -> None:
        """Compresses if enough rows have gathered. Raises ValueError, and changes nothing, if they are not finite."""
        if self.record_past and self.count.uncropped:
            return
        self.check_finite()
        due = self.due()
        if self.compressor.accumulates and (due or self.count.uncounted >= self.interval):
            self._accumulate()
        if due:
            self._compress()
        self.recent_queries.trim(self.count.uncounted)

    def fill(self, kv: KV, prompt_end: Tensor | None) -> None:
        """Stores `kv`, saved from a layer with the same counters."""
        self.storage = self._allocate(kv.keys, kv.values, self.capacity(kv.rows))
        self._write(self.storage, kv)
        self.prompt_end = prompt_end

    def due(self) -> bool:
        """Whether `settle` would compress."""
        budget, count = self.compressor.budget, self.count
        if budget is None or (self.record_past and count.uncropped):
            return False
        after_first_forward = (
            count.round == 0 and count.fresh == count.seen and count.prompt_open and count.rows > budget
        )
        return count.rows >= budget + self.interval or after_first_forward

    def check_finite(self) -> None:
        """Raises ValueError if a compression is due and rows that are new since the last one are NaN or infinite."""
        if not self.due():
            return
        fresh = slice(self.count.rows - self.count.fresh, self.count.rows)
        for name, tensor in (("keys", self.kv.keys[:, :, fresh]), ("values", self.kv.values[:, :, fresh])):
            bad = int((~tensor.isfinite()).any(-1).sum())
            if bad:
                raise ValueError(
                    f"{bad} new rows of layer {self.layer_idx} have {name} that are NaN or infinite, so their scores "
                    "would be NaN: the "
                    "model overflows; try a dtype with more range, such as bfloat16 or float32"
                )

    def _accumulate(self) -> None:
        seen = self.observed(self.count.uncounted)
        if seen.queries is not None and self._storage.mass is not None:
            self._storage.mass[:, :, : self.count.rows] += ops.attention_mass(self.kv, seen)
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
        kept = self.compressor.compress(self.kv, self.observed(self.compressor.window))
        if kept.rows > (self.compressor.budget or kept.rows):
            raise ValueError(
                f"{self.compressor!r} kept {kept.rows} rows, more than its budget of {self.compressor.budget}"
            )
        if self._storage.rows != self.capacity(kept.rows):
            self.storage = None  # frees a prompt's rows before storage of the final size is made
            self.storage = self._allocate(kept.keys, kept.values, self.capacity(kept.rows))
        self._write(self._storage, kept)
        self.count.rows, self.count.fresh, self.count.round = kept.rows, 0, self.count.round + 1

    # Going back, batch operations ------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Nothing is compressed until the next `crop`, so that drafts can be rolled back."""
        self.record_past = True

    def check_crop(self, tokens: int) -> None:
        """Raises ValueError if the newest `tokens` tokens cannot be removed without loss."""
        if tokens > self.count.fresh:
            raise ValueError(
                f"cannot crop {tokens} tokens: only the {self.count.fresh} newest were added since the last "
                "compression; "
                "call cache.activate_past_recording() before the forward whose tokens may be removed"
            )
        if not self.recent_queries.can_drop(tokens) or (tokens > self.count.uncounted and self.compressor.accumulates):
            raise ValueError(
                f"cannot crop {tokens} tokens: their queries have already been scored or forgotten; call "
                "cache.activate_past_recording() before the forward whose tokens may be removed"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens, then compresses if due. Raises ValueError if that is
        impossible."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the tokens to remove as a negative number, got {tokens_to_remove}")
        tokens = -tokens_to_remove
        self.check_crop(tokens)
        if self.storage is None:
            return
        self.remove(tokens)
        self.count.uncropped = 0
        self.settle()
        self.count.prompt_open &= not (self.record_past or tokens)

    def remove(self, tokens: int) -> None:
        """Forgets the newest `tokens` tokens; `check_crop` says whether that is allowed."""
        self.waiting = 0
        self.count.seen -= tokens
        self.count.rows -= tokens
        self.count.fresh -= tokens
        self.count.uncounted = max(self.count.uncounted - tokens, 0)
        self.recent_queries.drop(tokens)
        if self.count.prompt_open and self.count.rows and self.prompt_end is not None:
            self.prompt_end = self.kv.positions[:, 0].amax(-1) + 1

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor of the layer by `change` of it; the batch is always the first axis."""
        if self.storage is None:
            return
        storage = self.storage
        self.storage = KV(
            change(storage.keys), change(storage.values), change(storage.positions),
            None if storage.mass is None else change(storage.mass),
        )  # fmt: skip
        self.prompt_end = None if self.prompt_end is None else change(self.prompt_end)
        self.recent_queries.map(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row `i` becomes row `beam_idx[i]`."""
        self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row becomes `repeats` rows."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these batch rows (indices or a bool mask)."""
        self.map(lambda tensor: tensor[indices.to(tensor.device)])


def _tensors(kv: KV) -> list[Tensor]:
    return [tensor for tensor in (kv.keys, kv.values, kv.positions, kv.mass) if tensor is not None]
