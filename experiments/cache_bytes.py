"""Bytes of a cache after 16,384 tokens, by part, beside the full cache in bfloat16.

Real caches of a model with 8 KV heads of 128 channels and 4 layers, random weights, with 16 query heads (as Qwen3-0.6B)
and 32 (as Qwen3-4B), which matters as recent queries are recorded for scoring. The figures are
`untyped_storage().nbytes()` of all that a cache holds, with the room for the open interval, which is there from the
start.

    python experiments/cache_bytes.py
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from decode_speed import build_model, fill
from machine import write_results
from rich.console import Console
from rich.table import Table

from kvcomp import CompressedCache
from kvcomp.core import Compressor
from kvcomp.evict import StreamingLLM, VaSE
from kvcomp.memory import size
from kvcomp.quant import MixedPrecision

INTERVAL = 64
QUANTIZERS = {
    "K8/V4": MixedPrecision.k8v4(),
    "K8/V4, 5 % exact": MixedPrecision.k8v4(exact=0.05),
    "K4/V4 rotated": MixedPrecision.k4v4_rotated(),
    "K4/V4, 5 % exact": MixedPrecision(4, exact=0.05),
    "K4/V2 rotated": MixedPrecision(key_bits=4, value_bits=2, rotate_keys=True, exact=0.0),
}


def measure(compressor: Compressor, query_heads: int, rows: int, length: int) -> dict[str, Any]:
    """What a cache holds after `length` tokens."""
    model = build_model(torch.bfloat16, query_heads)
    cache = CompressedCache(model, compressor, INTERVAL)
    fill(cache, rows, length - 1, torch.bfloat16, query_heads)
    model(torch.ones(1, 1, dtype=torch.long), cache=cache)
    memory = cache.memory()
    assert memory.seen == length
    return {
        "query_heads": query_heads, "compressor": repr(compressor), "rows": memory.rows, "total": memory.total,
        "full": memory.full, "compression": memory.compression, "bits_per_element": memory.bits_per_element,
        "parts": memory.parts,
    }  # fmt: skip


def main(
    length: Annotated[int, typer.Option(help="tokens")] = 16_384,
    budget: Annotated[int, typer.Option(help="rows that VaSE keeps")] = 4096,
    name: Annotated[str, typer.Option(help="file in experiments/results, without .json")] = "cache_bytes",
) -> None:
    """Count bytes and write experiments/results/<name>.json."""
    torch.set_num_threads(1)
    pipelines: dict[str, tuple[Compressor, int]] = {"every row": (StreamingLLM(2 * length), length)}
    pipelines |= {f"every row | {name}": (method, length) for name, method in QUANTIZERS.items()}
    pipelines |= {"VaSE": (VaSE(budget), budget)}
    pipelines |= {f"VaSE | {name}": (VaSE(budget) | method, budget) for name, method in QUANTIZERS.items()}
    table = Table(
        "query heads", "cache", "x full", "bits", "total", "parts", title=f"bytes at {length} tokens, bfloat16"
    )
    rows = []
    with torch.no_grad():
        for heads in (16, 32):
            for label, (compressor, stored) in pipelines.items():
                row = {"cache": label} | measure(compressor, heads, stored, length)
                parts = ", ".join(f"{part} {size(count)}" for part, count in row["parts"].items() if count)
                figures = [f"{row['compression']:.2f}", f"{row['bits_per_element']:.2f}", size(row["total"])]
                table.add_row(str(heads), label, *figures, parts)
                rows.append(row)
    Console(width=200).print(table)
    print("written to", write_results(name, rows, length=length, budget=budget, interval=INTERVAL))


if __name__ == "__main__":
    typer.run(main)
