"""Errors of compressed rows, on tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvcomp import ops
from kvcomp.core import KV, Compressor, Observed
from kvcomp.quant.mixed import MixedKV
from kvcomp.remembered import RememberedQueries
from kvcomp.report.figures import HeadFigures, Point

TOP = (2, 5, 10)
"""Percent of the rows with the largest value range whose share of the error is reported."""


@dataclass(frozen=True)
class Pair:
    """What a compressor made of the rows of a layer, beside these rows.

    `whole`: all rows. `result`: what is stored. `kept`: the original rows that are still there, in the order of
    `result`. `older` and `packed` `[batch, kv_heads, rows]`: rows that are not among the recent ones, and rows that are
    packed; both all rows where nothing is packed.
    """

    whole: KV
    result: KV
    kept: KV
    older: Tensor
    packed: Tensor
    seen: Observed

    @classmethod
    def of(cls, whole: KV, seen: Observed, compressor: Compressor, window: int | None = None) -> Pair:
        """Compresses `whole`, rows at positions 0, 1, 2, ..., judged by the last `window` queries (None: by all).

        A compressor that wants more gets more, but none because another one does. Raises ValueError if no row is left
        to be packed, for one that needs queries where there are none, and for rows that overflow when they are packed.
        """
        assert bool((whole.positions == torch.arange(whole.rows, device=whole.positions.device)).all())  # indices too
        given = seen if window is None else seen.last(max(window, compressor.window))
        if compressor.accumulates:
            if given.queries is None:
                raise ValueError(f"{compressor!r} needs attention: pass queries")
            whole = replace(whole, mass=ops.attention_mass(whole, given))
        if compressor.remembers and given.queries is not None and given.query_positions is not None:
            held = RememberedQueries(compressor.remembers, given.rotary)
            held.add(given.queries, given.query_positions, whole.keys.shape[1])
            given = replace(given, remembered=held.queries, remembered_positions=held.positions)
        result = compressor.compress(whole, given)
        if not all(bool(rows.isfinite().all()) for rows in (result.keys, result.values)):
            raise ValueError(
                f"rows of layer {seen.layer} overflow when {compressor!r} packs them, so they have no error"
            )
        at = result.positions
        older = packed = torch.ones_like(at, dtype=torch.bool)
        if isinstance(result, MixedKV):
            older = ~_holds(result.recent.positions, at, whole.rows)
            packed = _holds(result.packed.positions, at, whole.rows)
        if compressor.unpacked is not None and not (isinstance(result, MixedKV) and bool(older.any())):
            raise ValueError(
                f"{compressor!r} leaves the {whole.rows} rows of layer {seen.layer} as they are, as all of them are "
                "recent: give it more rows, or lower recent"
            )
        judging = seen if window is None else seen.last(window)
        return cls(whole, result, whole.take(at), older, packed, judging)

    @cached_property
    def squares(self) -> tuple[Tensor, Tensor]:
        """`|x_i - x'_i|^2` of the keys and of the values `[batch, kv_heads, rows]`, float64."""
        return (
            (self.kept.keys.double() - self.result.keys.double()).square().sum(-1),
            (self.kept.values.double() - self.result.values.double()).square().sum(-1),
        )

    def heads(self) -> Iterator[Pair]:
        """One KV head after the other."""
        for head in range(self.older.shape[1]):
            part = slice(head, head + 1)

            def cut(tensor: Tensor, part: slice = part) -> Tensor:
                return tensor[:, part]

            result = KV(self.result.keys[:, part], self.result.values[:, part], self.result.positions[:, part])
            seen = self.seen
            if seen.queries is not None:
                seen = replace(seen, queries=seen.queries.unflatten(1, (self.older.shape[1], -1))[:, head])
            yield Pair(self.whole.map(cut), result, self.kept.map(cut), cut(self.older), cut(self.packed), seen)


def _holds(positions: Tensor, at: Tensor, rows: int) -> Tensor:
    """For each position of `at` whether it is one of `positions`, below `rows` or negative, of the same head."""
    table = torch.zeros(*positions.shape[:2], rows + 1, dtype=torch.bool, device=positions.device)
    table.scatter_(2, positions.long().where(positions >= 0, rows), True)
    return table.gather(2, at.long())


def measure_head(pair: Pair, name: str, head: int, sinks: int) -> HeadFigures:
    """The figures of a pair with one KV head."""
    key_rows, value_rows = pair.squares
    key_range, value_range = (spread(rows) for rows in (pair.kept.keys, pair.kept.values))
    first = pair.kept.positions < sinks
    key_error, value_error = (
        _relative(rows[pair.older].sum(), tensor.double()[pair.older].square().sum())
        for rows, tensor in ((key_rows, pair.kept.keys), (value_rows, pair.kept.values))
    )
    tops = {share: largest(value_range, pair.older, share / 100) for share in TOP}
    shares = {f"{side}_top_{share}": _share(rows, top, pair.older) for share, top in tops.items()
              for side, rows in (("value", value_rows), ("key", key_rows))}  # fmt: skip
    counted = pair.packed & ~first
    return HeadFigures(
        name, pair.seen.layer, head, key_error, value_error, _decibel(key_error), _decibel(value_error),
        output_error(pair), _over_median(spread(pair.whole.keys)), _over_median(spread(pair.whole.values)),
        **shares,
        value_sinks=_share(value_rows, first, pair.older), key_sinks=_share(key_rows, first, pair.older),
        value_fit=correlation(value_range[counted], value_rows[counted]),
        key_fit=correlation(key_range[counted], key_rows[counted]),
    )  # fmt: skip


def spread(rows: Tensor) -> Tensor:
    """`Range(x) = max(x) - min(x)` over the channels of each row."""
    wide = rows.double()
    return wide.amax(-1) - wide.amin(-1)


def largest(score: Tensor, among: Tensor, share: float) -> Tensor:
    """Bool: of the rows `among`, the `round(share * n)` (at least one) of each head with the largest score."""
    ordered = score.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    wanted = (share * among.sum(-1, keepdim=True)).round().clamp_min(1)
    chosen = (torch.arange(score.shape[-1], device=score.device) < wanted).expand_as(among)
    return torch.zeros_like(among).scatter_(2, ordered, chosen) & among


def correlation(x: Tensor, y: Tensor) -> float | None:
    """Pearson's r of two vectors; None if there are fewer than 3 numbers or one of them is constant."""
    if x.numel() < 3 or any(bool(side.min() == side.max()) for side in (x, y)):  # whose mean may be rounded
        return None
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else None


def attend(kv: KV, seen: Observed) -> tuple[Tensor, Tensor]:
    """Weights `softmax(scaling * q . k)` `[batch, kv_heads, group, window, rows]` over the rows that are not later than
    the query, and the output `sum_i w_i v_i`. A query that sees no row has output 0. In float64, in which products of
    three float32 numbers do not overflow."""
    assert seen.queries is not None
    window, positions = seen.queries.shape[2], seen.query_positions
    positions = kv.positions[:, 0, -window:] if positions is None else positions
    logits = _folded(seen.queries, kv, seen.scaling) @ kv.keys.double()[:, :, None].transpose(-1, -2)
    visible = kv.positions[:, :, None, None, :] <= positions[:, None, None, :, None]
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return weights, weights @ kv.values.double()[:, :, None]


def _folded(queries: Tensor, kv: KV, scaling: float | None) -> Tensor:
    """Queries by KV head, scaled, `[batch, kv_heads, group, window, head_dim]`, float64."""
    scaling = kv.head_dim**-0.5 if scaling is None else scaling
    return scaling * queries.double().unflatten(1, (kv.keys.shape[1], -1))


def output_error(pair: Pair) -> float | None:
    """`|O - O'|_F / |O|_F` of the attention output of the recorded queries over all rows, and over those stored."""
    if pair.seen.queries is None:
        return None
    output, compressed = attend(pair.whole, pair.seen)[1], attend(pair.result, pair.seen)[1]
    return _relative((output - compressed).square().sum(), output.square().sum())


def contributions(pair: Pair) -> tuple[Tensor, Tensor]:
    """What the error of each kept row adds to the squared error of the attention output, from its key and from its
    value; `[batch, kv_heads, rows]`.

    To first order and with errors of different rows independent, row i with errors `dk_i`, `dv_i` and weight `w_qi`
    adds, over the output,

        values: sum_q w_qi^2 |dv_i|^2 / sum_q |o_q|^2
        keys:   sum_q w_qi^2 (scaling q . dk_i)^2 |v_i - o_q|^2 / sum_q |o_q|^2

    (an error of the logit moves the output along `v_i - o_q`). Attention and output are those over the kept rows before
    they were packed; `sum_q` runs over the recorded queries and the query heads of the group. Without queries all
    weights are equal, and keys and values count by their own squared norm: `|dx_i|^2 / sum_j |x_j|^2`.
    """
    key_rows, value_rows = pair.squares
    if pair.seen.queries is None:
        norms = (rows.double().square().sum().clamp_min(1e-300) for rows in (pair.kept.keys, pair.kept.values))
        key_norm, value_norm = norms
        return key_rows / key_norm, value_rows / value_norm
    weights, output = attend(pair.kept, pair.seen)
    shift = (pair.kept.keys.double() - pair.result.keys.double())[:, :, None]
    moved = _folded(pair.seen.queries, pair.kept, pair.seen.scaling) @ shift.transpose(-1, -2)
    values = pair.kept.values.double()[:, :, None]
    squares = output.square().sum(-1, keepdim=True)
    apart = squares + values.square().sum(-1)[..., None, :] - 2 * output @ values.transpose(-1, -2)
    keys = (weights * moved).square() * apart.clamp_min(0)
    total = squares.sum().clamp_min(1e-300)
    return keys.sum((2, 3)) / total, weights.square().sum((2, 3)) * value_rows / total


def sample(pair: Pair, head: int, count: int, sinks: int) -> list[Point]:
    """Up to `count` packed rows behind the first `sinks` tokens, evenly spaced, as points of `Report.points`."""
    key_rows, value_rows = pair.squares
    key_range, value_range = spread(pair.kept.keys), spread(pair.kept.values)
    widths = pair.kept.values.shape[-1], pair.kept.keys.shape[-1]
    chosen = (pair.packed & (pair.kept.positions >= sinks)).flatten().nonzero().flatten()
    places = chosen[:: max(1, -(-chosen.numel() // count))].tolist()
    columns = (value_range, value_rows / widths[0], key_range, key_rows / widths[1])
    rounded = [[float(f"{column.flatten()[index]:.6g}") for index in places] for column in columns]
    return [(pair.seen.layer, head, *point) for point in zip(*rounded, strict=True)]


def _relative(error: Tensor, norm: Tensor) -> float:
    """`sqrt(error / norm)`; 0 without an error."""
    return float((error / norm.clamp_min(1e-300)).sqrt()) if float(error) else 0.0


def _decibel(error: float) -> float | None:
    return float(-20 * torch.tensor(error).log10()) if error else None


def _share(rows: Tensor, chosen: Tensor, among: Tensor) -> float | None:
    total = float(rows[among].sum())
    return float(rows[chosen & among].sum()) / total if total else None


def _over_median(ranges: Tensor) -> float | None:
    """Largest over median range; batch rows pooled. None if the median is 0."""
    middle = float(ranges.quantile(0.5))
    return float(ranges.max()) / middle if middle else None
