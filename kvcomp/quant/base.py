"""`Quantizer`: which rows are packed and which stay in the model dtype; a method says how a row is packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import EMPTY, KV, Kept, Observed, Rows, Score, ValueRows
from kvcomp.evict.base import LARGEST, ranked
from kvcomp.pipeline import Composable
from kvcomp.quant.mixed import MixedKV, Packed, compacted, only
from kvcomp.quant.packed import PackedRows

ExactBy = Literal["value_range", "key_range", "random", "none"]


@dataclass(frozen=True)
class Quantizer(Composable, ABC):
    """Packs every row but the `recent` newest ones and, of the older, the exact ones; evicts none.

    Exact rows keep the model dtype: the first `sinks` tokens, and of the `n` older rows besides them the
    `round(exact * n)` that `exact_by` puts first: the largest `Range(v) = max(v) - min(v)` over channels (value_range),
    the largest `Range(k)` (key_range), a fixed number per token (random), or no row (none). A row is packed once: an
    exact one may be packed later, a packed one never becomes exact, so a head has fewer exact rows where too few are
    left to choose from.

    Raises ValueError for sizes below zero, `exact` outside [0, 1], and rows to be packed that are NaN or infinite.
    """

    _: KW_ONLY
    exact: float = 0.0
    exact_by: ExactBy = "value_range"
    sinks: int = 4
    recent: int = 64

    budget = None
    window = 0
    accumulates = False

    def __post_init__(self) -> None:
        self.require(sinks=0, recent=0)
        if not 0 <= self.exact <= 1:
            raise ValueError(f"{type(self).__name__}: exact is a share of the rows, 0 to 1, got {self.exact}")
        if self.exact_by not in get_args(ExactBy):
            names = ", ".join(get_args(ExactBy))
            raise ValueError(f"{type(self).__name__}: exact_by must be one of {names}, got {self.exact_by!r}")

    @abstractmethod
    def pack(self, keys: Rows, values: ValueRows, index: Kept | None = None) -> tuple[PackedRows, PackedRows]:
        """The rows `index` `[batch, kv_heads, slots]` of finite keys and values (None: all), packed; a row of zeros
        where the index is negative."""

    @property
    def unpacked(self) -> int | None:  # type: ignore[override]
        """The `recent` newest rows."""
        return self.recent

    def exact_rows(self, older: int) -> int:
        """Exact rows among `older` ones, sinks included."""
        return min(self.sinks, older) + self._chosen_rows(older)

    def _chosen_rows(self, older: int) -> int:
        return 0 if self.exact_by == "none" else round(self.exact * max(older - self.sinks, 0))

    def compress(self, kv: KV, seen: Observed) -> KV:
        """The same rows, packed; `kv` itself while it has no more than `recent`."""
        recent = min(self.recent, kv.rows)
        if kv.rows == recent:
            return kv
        self.check_head_dim(kv.head_dim)
        older, newest = _split(kv, recent)
        self._check_finite(older, seen.layer)
        exact = self._exact(kv, older, seen)
        packed = self._packed(older, (older.positions != EMPTY) & ~exact)
        if isinstance(kv, MixedKV):
            packed = kv.packed.extended(packed)
        return MixedKV(packed, only(older, exact), newest, kv.rows)

    def _exact(self, kv: KV, older: KV, seen: Observed) -> Tensor:
        """Which rows of `older` are exact: sinks, and as many of the others as the length of each text asks for."""
        real = kv.slot_positions >= 0
        sinks = torch.zeros_like(older.pads)
        if self.sinks:
            positions = kv.slot_positions.masked_fill(~real, torch.iinfo(torch.int32).max)
            last = positions.topk(min(self.sinks, positions.shape[2]), largest=False).values.amax(-1, keepdim=True)
            sinks = (older.positions >= 0) & (older.positions <= last)
        texts = (real.sum(-1)[:, 0] - self.recent).clamp_min(0).tolist()
        counts = torch.tensor([self._chosen_rows(rows) for rows in texts], device=older.positions.device)
        most = min(max(counts.tolist()), older.rows)
        if not most:
            return sinks
        score = self._score(older, seen).clamp_max(LARGEST)  # the range of huge values is infinite
        ranks = ranked(score.masked_fill(sinks | (older.positions < 0), -torch.inf), most)
        within = torch.arange(most, device=ranks.device) < counts[:, None, None]
        chosen = torch.zeros_like(sinks).scatter_(2, ranks, within.expand_as(ranks))
        return sinks | (chosen & (older.positions >= 0))

    def _score(self, older: KV, seen: Observed) -> Score:
        if self.exact_by == "random":
            return replace(seen, round=0).uniform(older.positions)
        rows = older.keys if self.exact_by == "key_range" else older.values
        return ops.value_magnitude(KV(rows, rows, older.positions), "range")

    def _check_finite(self, rows: KV, layer: int) -> None:
        real = rows.positions >= 0
        for name, tensor in (("keys", rows.keys), ("values", rows.values)):
            bad = int((~tensor.isfinite().all(-1) & real).sum())
            if bad:
                raise ValueError(
                    f"{type(self).__name__}: {bad} {name} of layer {layer} are NaN or infinite and cannot be packed; "
                    "try a dtype with more range, such as bfloat16"
                )

    def _packed(self, rows: KV, chosen: Tensor) -> Packed:
        index, used = compacted(chosen)
        positions = ops.take_rows(rows.positions, index).masked_fill_(~used, EMPTY)
        mass = None if rows.mass is None else ops.take_rows(rows.mass, index)
        keys, values = self.pack(rows.keys, rows.values, index.masked_fill(positions < 0, -1))  # padding holds anything
        return Packed(keys, values, positions, mass)


def _split(kv: KV, recent: int) -> tuple[KV, KV]:
    """The rows that are not packed, without and within the `recent` newest of all, oldest first."""
    if not isinstance(kv, MixedKV):
        return kv.without_newest(recent), kv.map(lambda tensor: tensor[:, :, kv.rows - recent :].clone())
    newest = torch.zeros_like(kv.slot_positions, dtype=torch.bool)
    newest = newest.scatter_(2, kv.order[:, :, kv.rows - recent :], True)[:, :, kv.packed.rows :]
    loose = kv.exact.join(kv.recent)  # exact rows are older than recent ones
    return only(loose, ~newest & (loose.positions != EMPTY)), only(loose, newest)
