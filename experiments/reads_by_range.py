"""Whether the rows with the largest value ranges are those that will be read, as V slots suppose.

Three quarters into a text, sinks and recent rows left out: the share of the attention to come that each tenth of the
rows gets, ordered by value range (`max - min` over channels); the share `read` of the rows that some later query reads
with a weight of `READ` or more; and how many of those are in the quarter with the largest ranges, 25 % by chance. Each
layer, KV head and text on its own.

    python experiments/reads_by_range.py [--model reasoner] [--model smollm2-135m]
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from error_by_range import SINKS, by_tenth, each_model
from machine import write_results
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from weights import attention_weights

RECENT, READ = 32, 0.1


@torch.no_grad()
def rows_of(name: str, model: PreTrainedModel, ids: Tensor) -> list[dict[str, Any]]:
    """A line a layer."""
    cache, now = DynamicCache(config=model.config), 3 * ids.shape[1] // 4
    model(ids[:, :now], cache=cache, logits_to_keep=1)
    sizes = [ranges(layer.values[:, :, SINKS : now - RECENT]) for layer in cache.layers]
    to_come = attention_weights(model, ids[:, now:], cache=cache)
    found = []
    for index, (size, weights) in enumerate(zip(sizes, to_come, strict=True)):
        of_older = weights[..., SINKS : now - RECENT]
        read = of_older.amax((2, 3)) >= READ
        quarter = size.argsort(dim=-1, descending=True)[..., : size.shape[2] // 4]
        found.append({
            "model": name, "layer": index, "weight_by_tenth": by_tenth_of_each(size, of_older.mean(2).sum(2)),
            "read": float(read.float().mean()),
            "read_in_largest_quarter": float(read.gather(2, quarter).sum() / read.sum().clamp_min(1)),
        })  # fmt: skip
    return found


def ranges(values: Tensor) -> Tensor:
    """`[batch, kv_heads, rows]`."""
    return (values.amax(-1) - values.amin(-1)).float()


def by_tenth_of_each(size: Tensor, weight: Tensor) -> list[float]:
    """`by_tenth` of each text and KV head, the mean of them."""
    pairs = zip(size.flatten(0, 1), weight.flatten(0, 1), strict=True)
    return torch.tensor([by_tenth(*pair) for pair in pairs]).mean(0).tolist()


def in_largest_quarter(rows: list[dict[str, Any]], model: str) -> float:
    """The share of the rows that are read in some layer of `model`; all layers have as many rows."""
    these = [row for row in rows if row["model"] == model]
    return sum(row["read"] * row["read_in_largest_quarter"] for row in these) / sum(row["read"] for row in these)


def main(
    model: Annotated[list[str] | None, typer.Option(help="Repeatable; without it both small models.")] = None,
) -> None:
    """Write results/reads_by_range.json and print the means over layers."""
    torch.set_num_threads(1)
    rows = []
    for name, network, ids in each_model(model):
        rows += rows_of(name, network, ids)
        typer.echo(f"{name}: {in_largest_quarter(rows, name):.0%} of the rows that are read have the largest ranges")
    typer.echo(f"wrote {write_results('reads_by_range', rows, read=READ, recent=RECENT, sinks=SINKS)}")


if __name__ == "__main__":
    typer.run(main)
