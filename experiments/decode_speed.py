"""Decoding speed: DynamicCache + sdpa, every row kept by kvcomp, and each method, alternating in one process.

The model has Qwen3-0.6B's geometry (hidden 1024, 16 query heads, 8 KV heads, head_dim 128) with 4 layers, random
weights and a vocabulary of 1,024, so that the output layer does not hide the cache. Caches are filled with random rows
to the state they have after so many tokens; an evicting one then holds `budget` rows. Every variant decodes the same
steps in turns of 16.

    python experiments/decode_speed.py [--lengths 2048,8192,16384,32768] [--budgets 4096,1024] [--dtypes
float32,bfloat16]
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from machine import write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config
from transformers.cache_utils import Cache

from kvcomp import CompressedCache
from kvcomp.evict import METHODS, StreamingLLM

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM, VOCABULARY = 4, 8, 16, 128, 1024
TURN = 16
FULL, KEPT = "DynamicCache + sdpa", "every row kept"


@dataclass
class Variant:
    """One line of the table: a cache, its model, and the seconds of each step."""

    name: str
    budget: int | None
    model: PreTrainedModel
    cache: Cache
    steps: list[float] = field(default_factory=list)
    compressions: list[float] = field(default_factory=list)

    def decode(self, steps: int) -> None:
        """Runs `steps` single-token forwards and notes the seconds of each; those that compress apart."""
        token = torch.ones(1, 1, dtype=torch.long)
        for _ in range(steps):
            before = self._rounds()
            start = time.perf_counter()
            self.model(token, cache=self.cache)
            seconds = time.perf_counter() - start
            (self.steps if self._rounds() == before else self.compressions).append(seconds)

    def _rounds(self) -> int:
        return self.cache.compressed[0].count.round if isinstance(self.cache, CompressedCache) else 0

    def row(self, length: int, dtype: str, interval: int, kept_step: float, full_step: float) -> dict[str, Any]:
        """Median step, with the share of a compression in it, as a line of the table."""
        step = statistics.median(self.steps)
        compression = statistics.median(self.compressions) - step if self.compressions else 0.0
        averaged = step + compression / interval
        return {
            "dtype": dtype, "length": length, "variant": self.name, "budget": self.budget,
            "ms_step": 1e3 * step, "ms_compression": 1e3 * compression, "tokens_per_second": 1 / averaged,
            "compression_share": compression / interval / step,
            "times_full": full_step / averaged, "times_kept": kept_step / averaged, "kv_bytes": kv_bytes(self.cache),
        }  # fmt: skip


def kv_bytes(cache: Cache) -> int:
    """Bytes of keys and values; for a CompressedCache everything it holds."""
    if isinstance(cache, CompressedCache):
        return cache.memory().total
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(_nbytes(getattr(layer, name, None)) for layer in cache.layers for name in names)


def _nbytes(tensor: torch.Tensor | None) -> int:
    """Bytes of a tensor; of a quantized one those of the tensors that it is made of."""
    if tensor is None:
        return 0
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_nbytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.untyped_storage().nbytes()


def build_model(dtype: torch.dtype, query_heads: int = QUERY_HEADS) -> PreTrainedModel:
    """Random weights in Qwen3-0.6B's geometry with 4 layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
        num_attention_heads=query_heads, num_key_value_heads=KV_HEADS, max_position_embeddings=65536,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def fill(cache: Cache, rows: int, length: int, dtype: torch.dtype, query_heads: int = QUERY_HEADS) -> Cache:
    """Puts `rows` random rows into each layer, the newest of a text of `length` tokens."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(length - rows, length)[None]
    for index in range(LAYERS):
        keys, values = (torch.randn(1, KV_HEADS, rows, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
        cache.update(keys, values, index, kwargs={"position_ids": positions})
        if isinstance(cache, CompressedCache):
            layer = cache.compressed[index]
            layer.count.seen = length
            layer.observe(torch.randn(1, query_heads, rows, HEAD_DIM, generator=generator).to(dtype), HEAD_DIM**-0.5)
    return cache


def measure(
    length: int, dtype: torch.dtype, budgets: list[int], methods: list[str], steps: int, advance: Any
) -> list[dict[str, Any]]:
    """All variants at one length and dtype."""
    model, interval = build_model(dtype), 64
    touched = copy.deepcopy(model)
    keep_all = CompressedCache(touched, StreamingLLM(length + steps + interval), interval)
    variants = [
        Variant(FULL, None, model, fill(DynamicCache(config=model.config), length, length, dtype)),
        Variant(KEPT, None, touched, fill(keep_all, length, length, dtype)),
    ]
    for name in methods:
        for budget in (budget for budget in budgets if budget <= length):
            cache = CompressedCache(touched, METHODS[name](budget=budget), interval)
            variants.append(Variant(name, budget, touched, fill(cache, budget, length, dtype)))
    for variant in variants:  # an evicting cache once through a compression, whose first memory is slow to come by
        variant.decode(2 if variant.budget is None else interval + 2)
        variant.steps.clear()
        variant.compressions.clear()
    for _ in range(steps // TURN):
        for variant in variants:
            variant.decode(TURN)
            advance(TURN)
    full, kept = (statistics.median(variant.steps) for variant in variants[:2])
    return [variant.row(length, str(dtype).removeprefix("torch."), interval, kept, full) for variant in variants]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table(title="decoding, one thread")
    for column in (
        "dtype",
        "tokens",
        "cache",
        "budget",
        "tokens/s",
        "x full",
        "x kept",
        "ms step",
        "ms compression",
        "share",
        "MiB",
    ):
        table.add_column(column, justify="left" if column in ("dtype", "cache") else "right", no_wrap=True)
    for row in rows:
        speed = [f"{row[name]:.{digits}f}" for name, digits in (("tokens_per_second", 1), ("times_full", 2))]
        times = [f"{row['times_kept']:.2f}", f"{row['ms_step']:.1f}", f"{row['ms_compression']:.1f}"]
        share, mebibytes = f"{row['compression_share']:.1%}", f"{row['kv_bytes'] / 2**20:.1f}"
        cache = [row["dtype"], str(row["length"]), row["variant"], str(row["budget"] or "")]
        table.add_row(*cache, *speed, *times, share, mebibytes)
    Console(width=140).print(table)


def main(
    lengths: Annotated[str, typer.Option(help="tokens in the cache, comma-separated")] = "2048,8192,16384,32768",
    budgets: Annotated[str, typer.Option(help="rows kept, comma-separated")] = "4096,1024",
    dtypes: Annotated[str, typer.Option(help="comma-separated")] = "float32,bfloat16",
    methods: Annotated[str, typer.Option(help="comma-separated, or all")] = "all",
    steps: Annotated[int, typer.Option(help="decode steps of each variant, a multiple of 16")] = 128,
    name: Annotated[str, typer.Option(help="file in experiments/results, without .json")] = "decode_speed",
) -> None:
    """Measure decoding speed and write experiments/results/<name>.json."""
    torch.set_num_threads(1)
    names = list(METHODS) if methods == "all" else methods.split(",")
    grid = [(int(length), getattr(torch, dtype)) for dtype in dtypes.split(",") for length in lengths.split(",")]
    rows: list[dict[str, Any]] = []
    wanted = [int(budget) for budget in budgets.split(",")]
    with torch.no_grad(), Progress() as progress:
        total = sum(steps * (2 + len(names) * sum(budget <= length for budget in wanted)) for length, _ in grid)
        task = progress.add_task("decoding", total=total)
        for length, dtype in grid:
            progress.update(task, description=f"{dtype} {length}")
            rows += measure(length, dtype, wanted, names, steps, lambda done: progress.advance(task, done))
    show(rows)
    print("written to", write_results(name, rows, steps=steps, interval=64, layers=LAYERS))


if __name__ == "__main__":
    typer.run(main)
