"""`Quantizer`: which rows are packed and which stay in the model dtype; a method says how a row is packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import EMPTY, KV, Observed, Rows, Score, ValueRows
from kvcomp.evict.base import ranked
from kvcomp.pipeline import Composable
from kvcomp.quant.mixed import MixedKV, Packed, Part, taken
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
    def pack(self, keys: Rows, values: ValueRows) -> tuple[PackedRows, PackedRows]:
        """Finite keys and values, packed row by row."""

    @property
    def unpacked(self) -> int | None:  # type: ignore[override]
        """The `recent` newest rows."""
        return self.recent

    def exact_rows(self, older: int) -> int:
        """Exact rows among `older` ones, sinks included."""
        sinks = min(self.sinks, older)
        return sinks + (0 if self.exact_by == "none" else round(self.exact * (older - sinks)))

    def compress(self, kv: KV, seen: Observed) -> KV:
        """The same rows, packed; `kv` itself while it has no more than `recent`."""
        recent = min(self.recent, kv.rows)
        if kv.rows == recent:
            return kv
        self.check_head_dim(kv.head_dim)
        older, newest = _split(kv, recent)
        exact = self._exact(kv, older, seen, self.exact_rows(kv.rows - recent))
        packed = self._packed(only(older, (older.positions != EMPTY) & ~exact), seen.layer)
        if isinstance(kv, MixedKV):
            packed = kv.packed.join(packed)
            used = packed.positions != EMPTY
            packed = packed if bool(used.all()) else only(packed, used)
        return MixedKV(packed, only(older, exact), newest, kv.rows)

    def _exact(self, kv: KV, older: KV, seen: Observed, count: int) -> Tensor:
        """Which rows of `older` are exact, at most `count` of each head."""
        first = kv.slot_positions.masked_fill(kv.slot_positions < 0, torch.iinfo(torch.int32).max)
        score = self._score(older, seen).masked_fill(older.pads, -1.0)  # a range is not negative
        if self.sinks:
            last_sink = first.topk(min(self.sinks, first.shape[2]), largest=False).values.amax(-1, keepdim=True)
            score = score.masked_fill((older.positions >= 0) & (older.positions <= last_sink), torch.inf)
        unused = older.positions == EMPTY
        chosen = ranked(score.masked_fill(unused, -torch.inf), min(count, older.rows))
        return torch.zeros_like(unused).scatter_(2, chosen, True) & ~unused

    def _score(self, older: KV, seen: Observed) -> Score:
        if self.exact_by == "random":
            return replace(seen, round=0).uniform(older.positions)
        rows = older.keys if self.exact_by == "key_range" else older.values
        return ops.value_magnitude(KV(rows, rows, older.positions), "range")

    def _packed(self, rows: KV, layer: int) -> Packed:
        hidden = rows.positions < 0
        if bool(hidden.any()):  # what padding holds is not looked at
            rows = KV(
                rows.keys.masked_fill(hidden[..., None], 0), rows.values.masked_fill(hidden[..., None], 0),
                rows.positions, rows.mass,
            )  # fmt: skip
        for name, tensor in (("keys", rows.keys), ("values", rows.values)):
            bad = int((~tensor.isfinite()).any(-1).sum())
            if bad:
                raise ValueError(
                    f"{type(self).__name__}: {bad} {name} of layer {layer} are NaN or infinite and cannot be packed; "
                    "try a dtype with more range, such as bfloat16"
                )
        return Packed(*self.pack(rows.keys, rows.values), rows.positions, rows.mass)


def _split(kv: KV, recent: int) -> tuple[KV, KV]:
    """The rows that are not packed, without and within the `recent` newest of all, oldest first."""
    if not isinstance(kv, MixedKV):
        return kv.without_newest(recent), kv.map(lambda tensor: tensor[:, :, kv.rows - recent :])
    newest = torch.zeros_like(kv.slot_positions, dtype=torch.bool)
    newest = newest.scatter_(2, kv.order[:, :, kv.rows - recent :], True)[:, :, kv.packed.rows :]
    loose = kv.exact.join(kv.recent)  # exact rows are older than recent ones
    return only(loose, ~newest & (loose.positions != EMPTY)), only(loose, newest)


def only(part: Part, chosen: Tensor) -> Part:
    """The `chosen` rows in their order, as new tensors; heads with fewer than others get empty slots at the end."""
    count = chosen.sum(-1, keepdim=True)
    index = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True)[:, :, : int(count.max())]
    return taken(part, index, torch.arange(index.shape[2], device=index.device) < count)
