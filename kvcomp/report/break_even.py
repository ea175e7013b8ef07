"""Whether rows kept exact pay: the error that they carry, against what the same bits remove from every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch

from kvcomp.core import KV, Compressor
from kvcomp.pipeline import Pipeline, stages_of
from kvcomp.quant.base import Quantizer
from kvcomp.quant.spec import describe
from kvcomp.report.figures import BreakEven

DENSE_BITS = 16
"""Bits per element at which an exact row is counted, also where a float32 model stands in for a 16-bit one."""
ASSUMED = 0.05
"""Share of exact rows that is looked at for a quantizer without any."""


@dataclass(frozen=True)
class Comparison:
    """The compressors that one break-even needs: `mixed` with a share of exact rows, `base` with none, and the uniform
    ones next to the bits of `mixed`. `bits`, `base_bits`, `lower_bits`, `upper_bits`: per element."""

    name: str
    mixed: Compressor
    base: Compressor
    lower: Compressor
    upper: Compressor | None
    share: float
    exact_by: str
    assumed: bool
    bits: float
    base_bits: float
    lower_bits: float
    upper_bits: float

    @property
    def compressors(self) -> list[Compressor]:
        """All that must be measured."""
        return [each for each in (self.mixed, self.base, self.lower, self.upper) if each is not None]

    @property
    def nearest(self) -> Compressor:
        """The uniform compressor whose bits are nearest to those of `mixed`."""
        if self.upper is None or self.bits - self.lower_bits <= self.upper_bits - self.bits:
            return self.lower
        return self.upper

    def result(self, errors: dict[str, tuple[float, float]], weighted: bool) -> BreakEven | None:
        """The figures, from the summed `contributions` (keys, values) of each compressor by its text; None if `base`
        has no error."""
        base, mixed, lower = (errors[describe(each)] for each in (self.base, self.mixed, self.lower))
        if not sum(base):
            return None
        low = _removed(lower, base)
        high = None if self.upper is None else _removed(errors[describe(self.upper)], base)
        return BreakEven(
            self.name, self.share, self.exact_by, self.assumed, weighted,
            describe(self.base), self.base_bits, self.bits - self.base_bits,
            _removed(mixed, base), _removed(mixed[:1], base[:1]), _removed(mixed[1:], base[1:]),
            (describe(self.lower), self.lower_bits, low),
            None if self.upper is None or high is None else (describe(self.upper), self.upper_bits, high),
            self._needed(low, high),
        )  # fmt: skip

    def _needed(self, low: float, high: float | None) -> float:
        """Share of the error removed at equal bits: that of a mixture of the two uniform settings, such as one in some
        layers and the other in the rest. Where there is no upper one, further steps are taken to leave as large a part
        of the error as the step from `base` to the lower one."""
        if high is None:
            steps = (self.bits - self.base_bits) / (self.lower_bits - self.base_bits)
            return 1 - max(1 - low, 0.0) ** steps
        return low + (self.bits - self.lower_bits) / (self.upper_bits - self.lower_bits) * (high - low)


def comparison(name: str, compressor: Compressor, like: KV) -> Comparison | None:
    """What must be measured to judge the exact rows of `compressor` on rows `like` these; None if it does not quantize,
    or no setting of other bits fits. Without exact rows, a share of `ASSUMED` by value range is looked at."""
    quantizer = quantizer_of(compressor)
    if quantizer is None:
        return None
    assumed = not quantizer.exact or quantizer.exact_by == "none"
    wanted = replace(quantizer, exact=ASSUMED, exact_by="value_range") if assumed else quantizer
    rows = min(like.rows, compressor.budget or like.rows)
    older = max(rows - wanted.recent - wanted.sinks, 1)
    share = (wanted.exact_rows(max(rows - wanted.recent, 0)) - wanted.sinks) / older
    steps = uniform(replace(wanted, exact=0.0, exact_by="value_range"), like)
    if share <= 0 or len(steps) == 1:
        return None
    base_bits, base = steps[0]
    bits = base_bits + share * (DENSE_BITS - base_bits)
    lower_bits, lower = next(step for step in reversed(steps) if step[0] <= bits + 1e-9)
    upper_bits, upper = next((step for step in steps if step[0] > bits + 1e-9), (lower_bits, None))
    mixed, lowest, below = (_with(compressor, each) for each in (wanted, base, lower))
    above = None if upper is None else _with(compressor, upper)
    return Comparison(
        name, mixed, lowest, below, above, share, wanted.exact_by, assumed, bits, base_bits, lower_bits, upper_bits
    )


def quantizer_of(compressor: Compressor) -> Quantizer | None:
    """The stage that packs rows."""
    return next((stage for stage in stages_of(compressor) if isinstance(stage, Quantizer)), None)


def uniform(base: Quantizer, like: KV) -> list[tuple[float, Quantizer]]:
    """`(bits, quantizer)`, ascending, from `base` on: smaller groups (or blocks), more bits for keys or for values.

    Of all these settings only those are listed whose error on Gaussian rows is below that of every cheaper one, so that
    bits are compared with the best that they can buy.
    """
    found = []
    for setting in _settings(base):
        try:
            quantizer = replace(base, **setting)
            for width in (like.keys.shape[-1], like.values.shape[-1]):
                quantizer.check_head_dim(width)
            found.append((*trial(quantizer, like), quantizer))
        except ValueError:  # a group that these rows do not take
            continue
    bits, error = trial(base, like)
    steps = [(bits, base)]
    for more, left, quantizer in sorted(found, key=lambda each: each[:2]):
        if more > steps[-1][0] + 1e-9 and left < error:
            steps.append((more, quantizer))
            error = left
    return steps


def _settings(base: Quantizer) -> Iterator[dict[str, Any]]:
    """Fields to replace for as many bits or more; more bits for keys come first, as their error matters more."""
    held = {field.name: getattr(base, field.name) for field in fields(base)}
    groups: list[dict[str, Any]] = [{}]
    for name in held.keys() & {"group_size", "block_size"}:
        groups += [{name: 2**power} for power in range(12, 0, -1) if 2**power <= (held[name] or 64)]
    widths: list[dict[str, Any]] = [{}]
    if {"key_bits", "value_bits"} <= held.keys():
        widths += [
            {"key_bits": keys, "value_bits": values}
            for keys, values in product((8, 4, 2), repeat=2)
            if keys >= held["key_bits"] and values >= held["value_bits"]
        ]
    yield from (width | group for width in widths for group in groups)


def trial(quantizer: Quantizer, like: KV) -> tuple[float, float]:
    """Bits per element of a packed row, scales and zero points included, as counted from rows that are packed, and the
    mean squared error of these, which are Gaussian."""
    noise = torch.Generator().manual_seed(0)
    widths = like.keys.shape[-1], like.values.shape[-1]
    rows = torch.randn(1, 1, 64, max(widths), generator=noise).to(like.keys.dtype)
    keys, values = (rows[..., :width].contiguous() for width in widths)
    packed = quantizer.pack(keys, values)
    held = sum(tensor.nbytes for side in packed for tensor in side.tensors.values())
    error = sum(
        float((side.unpack().float() - given.float()).square().mean())
        for side, given in zip(packed, (keys, values), strict=True)
    )
    return 8 * held / (64 * sum(widths)), error


def _with(compressor: Compressor, quantizer: Quantizer) -> Compressor:
    """`compressor` with another stage that packs."""
    if not isinstance(compressor, Pipeline):
        return quantizer
    return Pipeline(tuple(quantizer if isinstance(stage, Quantizer) else stage for stage in compressor.stages))


def _removed(error: tuple[float, ...], base: tuple[float, ...]) -> float:
    return 1 - sum(error) / sum(base) if sum(base) else 0.0
