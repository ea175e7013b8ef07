"""Decoding speed from packed rows, beside the same rows in the model dtype and transformers' own 4-bit cache.

The model of `decode_speed.py`: Qwen3-0.6B's geometry with 4 layers. Every variant holds the same random rows and
decodes the same steps in turns of 16. `x kept` compares a step, with its share of the compressions, to every row kept
in the model dtype; the last lines evict with VaSE and compare to VaSE alone.

    python experiments/packed_speed.py [--lengths 2048,4096,8192,16384] [--dtypes float32,bfloat16]
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from decode_speed import FULL, KEPT, LAYERS, TURN, Variant, build_model, fill, show
from machine import write_results
from rich.progress import Progress
from transformers import DynamicCache, PreTrainedModel, QuantizedCache

from kvcomp import CompressedCache
from kvcomp.core import Compressor
from kvcomp.evict import StreamingLLM, VaSE
from kvcomp.quant import MixedPrecision

INTERVAL, BUDGET = 64, 4096
EVICTED = "VaSE"
QUANTIZERS: dict[str, MixedPrecision] = {
    "K8/V4": MixedPrecision.k8v4(),
    "K4/V4 rotated": MixedPrecision.k4v4_rotated(),
    "K4/V4, 5 % exact": MixedPrecision(4),
    "K2/V2": MixedPrecision(2, exact=0.0),
}


def compressors(length: int) -> dict[str, tuple[Compressor, int]]:
    """By name: the compressor and the rows that its cache starts with."""
    alone: dict[str, tuple[Compressor, int]] = {name: (method, length) for name, method in QUANTIZERS.items()}
    if length < BUDGET:
        return alone
    evicted: dict[str, tuple[Compressor, int]] = {EVICTED: (VaSE(BUDGET), BUDGET)}
    evicted |= {f"{EVICTED} | {name}": (VaSE(BUDGET) | method, BUDGET) for name, method in QUANTIZERS.items()}
    return alone | evicted


def variants(length: int, dtype: torch.dtype, model: PreTrainedModel, steps: int) -> list[Variant]:
    """All caches of one length, filled."""
    touched = copy.deepcopy(model)
    kept = CompressedCache(touched, StreamingLLM(length + steps + 2 * INTERVAL), INTERVAL)
    quanto = QuantizedCache("quanto", model.config, nbits=4)
    found = [
        Variant(FULL, None, model, fill(DynamicCache(config=model.config), length, length, dtype)),
        Variant(KEPT, None, touched, fill(kept, length, length, dtype)),
        Variant("QuantizedCache, quanto 4 bit", None, model, fill(quanto, length, length, dtype)),
    ]
    for name, (compressor, rows) in compressors(length).items():
        cache = fill(CompressedCache(touched, compressor, INTERVAL), rows, length, dtype)
        found.append(Variant(name, compressor.budget, touched, cache))
    return found


def measure(length: int, dtype: torch.dtype, steps: int, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """A line for each cache of one length and dtype."""
    model = build_model(dtype)
    tested = variants(length, dtype, model, steps)
    for variant in tested:  # what compresses, once through a compression, whose first memory is slow to come by
        compresses = variant.name in compressors(length)
        variant.decode(INTERVAL + 2 if compresses else 2)
        variant.steps.clear()
        variant.compressions.clear()
    for _ in range(steps // TURN):
        for variant in tested:
            variant.decode(TURN)
            advance(TURN)
    step = {variant.name: statistics.median(variant.steps) for variant in tested}
    rows = []
    for variant in tested:
        beside = step[EVICTED] if variant.name.startswith(EVICTED) else step[KEPT]
        row = variant.row(length, str(dtype).removeprefix("torch."), INTERVAL, beside, step[FULL])
        rows.append(row | {"step_over_dense": step[variant.name] / beside})
    return rows


def main(
    lengths: Annotated[str, typer.Option(help="tokens in the cache, comma-separated")] = "2048,4096,8192,16384",
    dtypes: Annotated[str, typer.Option(help="comma-separated")] = "float32,bfloat16",
    steps: Annotated[int, typer.Option(help="decode steps of each variant, a multiple of 16")] = 128,
    name: Annotated[str, typer.Option(help="file in experiments/results, without .json")] = "packed_speed",
) -> None:
    """Measure decoding speed from packed rows and write experiments/results/<name>.json."""
    torch.set_num_threads(1)
    grid = [(int(length), getattr(torch, dtype)) for dtype in dtypes.split(",") for length in lengths.split(",")]
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), Progress() as progress:
        task = progress.add_task("decoding", total=sum(steps * (3 + len(compressors(length))) for length, _ in grid))
        for length, dtype in grid:
            progress.update(task, description=f"{dtype} {length}")
            rows += measure(length, dtype, steps, lambda done: progress.advance(task, done))
    show(rows)
    print("written to", write_results(name, rows, steps=steps, interval=INTERVAL, layers=LAYERS))


if __name__ == "__main__":
    typer.run(main)
