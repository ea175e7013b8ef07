"""Quantization error of values against their range: correlation by layer, and error by tenth of the rows.

Rows of a full cache are packed, sinks left out; the error of a row is its mean squared error over channels, its range
`max - min` over channels. With one group a row, min-max quantization has steps of `range / (2^bits - 1)`, so the error
should follow the square of the range. The paper's repository computes the same correlation (`quantize_hqq.py` of
github.com/terarachang/VaSE at bfa2692) and does not state its result.

    python experiments/error_by_range.py [--model reasoner] [--model smollm2-135m]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pydoc_data import topics
from typing import Annotated, Any

import torch
import typer
from machine import write_results
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvcomp.eval import tasks
from kvcomp.models import REASONER, SMOLLM2, load
from kvcomp.quant import MixedPrecision

SINKS, LENGTH, PROBLEMS, TENTHS = 4, 2048, 16, 10


def tokens(name: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Right chains of both families for the reasoner, else a stretch of Python's help topics; `[batch, tokens]`."""
    if name != REASONER:
        text = "\n\n".join(topics.topics.values())
        return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids[:LENGTH])[None]
    problems = [one for family in ("registers", "derivations") for one in tasks.find(family).load(f"0:{PROBLEMS}")]
    rows = [tokenizer(f"{one.prompt} {one.answer}").input_ids for one in problems]
    shortest = min(map(len, rows))
    return torch.tensor([row[:shortest] for row in rows])


def each_model(names: list[str] | None) -> Iterator[tuple[str, PreTrainedModel, Tensor]]:
    """Name, model and texts of `names`, or of both small models."""
    for name in names or [REASONER, SMOLLM2]:
        model, tokenizer = load(name)
        yield name, model, tokens(name, tokenizer)


def errors(keys: Tensor, values: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Range and mean squared error of each value `[batch, kv_heads, rows]`."""
    packed = MixedPrecision(bits=bits, group_size=group_size).pack(keys, values)[1].unpack().float()
    error = (packed - values.float()).square().mean(-1)
    return (values.amax(-1) - values.amin(-1)).float(), error


def by_tenth(size: Tensor, error: Tensor) -> list[float]:
    """Share of the whole error in each tenth of the rows, smallest ranges first."""
    order = size.flatten().argsort()
    ordered = error.flatten()[order]
    return [float(part.sum() / ordered.sum()) for part in ordered.tensor_split(TENTHS)]


@torch.no_grad()
def rows_of(name: str, model: PreTrainedModel, ids: Tensor) -> list[dict[str, Any]]:
    """A line a layer and setting."""
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, logits_to_keep=1)
    found = []
    width = cache.layers[0].values.shape[-1]
    for bits, group_size in itertools.product((4, 2), sorted({width, min(32, width)}, reverse=True)):
        for index, layer in enumerate(cache.layers):
            size, error = errors(layer.keys[:, :, SINKS:], layer.values[:, :, SINKS:], bits, group_size)
            together = torch.corrcoef(torch.stack([size.square().flatten(), error.flatten()]))[0, 1]
            found.append({
                "model": name, "bits": bits, "group_size": group_size, "layer": index,
                "correlation": float(together), "share_by_tenth": by_tenth(size, error),
                "range_median": float(size.median()), "range_99": float(size.quantile(0.99)),
            })  # fmt: skip
    return found


def main(
    model: Annotated[list[str] | None, typer.Option(help="Repeatable; without it both small models.")] = None,
) -> None:
    """Write results/error_by_range.json and print the means over layers."""
    torch.set_num_threads(1)
    rows = list(itertools.chain.from_iterable(rows_of(*one) for one in each_model(model)))
    for name, bits, size in dict.fromkeys((row["model"], row["bits"], row["group_size"]) for row in rows):
        these = [row for row in rows if (row["model"], row["bits"], row["group_size"]) == (name, bits, size)]
        mean = sum(row["correlation"] for row in these) / len(these)
        largest = sum(row["share_by_tenth"][-1] for row in these) / len(these)
        typer.echo(
            f"{name}, {bits} bits, groups of {size}: correlation {mean:.2f}, largest tenth {largest:.0%} of the error"
        )
    typer.echo(f"wrote {write_results('error_by_range', rows)}")


if __name__ == "__main__":
    typer.run(main)
