"""Decoding with a whole model of random weights; only this part needs transformers."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.cases import Sizes
from gpu.clock import Call, Clock, Deadline, Row, described

FULL = "DynamicCache"
TIMED = 2
"""Compressions of a cache that are timed, with the decode steps that lead to them."""
LONG, PATIENCE = 60.0, 30.0
"""Seconds that decoding with all layers takes, and that one cache may take."""


def build(sizes: Sizes, layers: int, device: torch.device) -> Any:
    """Random weights in Qwen3-4B's geometry."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=layers, head_dim=sizes.head_dim, num_attention_heads=query_heads(sizes),
        num_key_value_heads=sizes.kv_heads, max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def query_heads(sizes: Sizes) -> int:
    """Those of the first model."""
    return next(iter(sizes.models.values()))


def fill(cache: Any, sizes: Sizes, batch: int, rows: int, length: int, device: torch.device) -> None:
    """As `decode_speed.fill`, for any batch, device and number of layers: `rows` random rows in each."""
    positions = torch.arange(length - rows, length, device=device)[None]
    for index in range(len(cache.layers)):
        shape = (batch, sizes.kv_heads, rows, sizes.head_dim)
        keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        cache.update(keys, values, index, kwargs={"position_ids": positions})
        if hasattr(cache, "compressed"):
            layer = cache.compressed[index]
            layer.count.seen = length
            shape = (batch, query_heads(sizes), min(rows, 128), sizes.head_dim)
            queries = torch.randn(shape, device=device, dtype=torch.bfloat16)
            layer.waiting = queries.shape[2]  # older queries would be dropped
            layer.observe(queries, sizes.head_dim**-0.5)


def caches(model: Any, sizes: Sizes) -> dict[str, tuple[Callable[[], Any], int]]:
    """By name: maker, and the rows that the cache starts with."""
    from transformers import DynamicCache

    from kvcomp import CompressedCache
    from kvcomp.evict import VaSE
    from kvcomp.quant import MixedPrecision

    budget, length = sizes.budget, sizes.rows[0]
    evict, pack, both = VaSE(budget), MixedPrecision.k4v4_rotated(), VaSE(budget) | MixedPrecision(4)
    return {
        FULL: (lambda: DynamicCache(config=model.config), length),
        f"VaSE({budget})": (lambda: CompressedCache(model, evict, sizes.interval), budget),
        f"VaSE({budget}) | MixedPrecision(4)": (lambda: CompressedCache(model, both, sizes.interval), budget),
        "K4/V4 rotated": (lambda: CompressedCache(model, pack, sizes.interval), length),
    }


def layers_that_fit(sizes: Sizes, free: int, left: float) -> int:
    """All layers, or fewer if memory or time is short."""
    batch, rows = max(sizes.batches), sizes.rows[0] + (TIMED + 2) * sizes.interval
    layer = 4 * batch * sizes.kv_heads * rows * sizes.head_dim
    width = sizes.head_dim * (query_heads(sizes) + sizes.kv_heads)
    weights = 4 * sizes.hidden * width + 6 * sizes.hidden * sizes.intermediate
    rest = 4 * sizes.vocabulary * sizes.hidden + 12 * layer  # embedding, and what works on one layer
    fit = max(int((0.9 * free - rest) / (layer + weights)), 0)
    return min(sizes.layers, fit, sizes.layers if left > LONG else 8)


def decoding_rows(sizes: Sizes, clock: Clock, deadline: Deadline) -> Iterator[Row]:
    """A line for each cache and batch size."""
    from kvcomp.attention import uninstall

    layers = layers_that_fit(sizes, clock.free(), deadline.left())
    if layers < 1 or deadline.left(20) < 0:
        yield {"part": "decoding", "case": "all", "skipped": f"{deadline.left():.0f} s and {layers} layers are left"}
        return
    model = build(sizes, layers, clock.device)
    for batch in sizes.batches:
        full = None
        for name, (make, rows) in caches(model, sizes).items():
            uninstall(model)  # else the full cache would run through kvcomp's attention, too
            row: Row = {"part": "decoding", "case": name, "batch": batch, "layers": layers, "rows": rows}
            clock.free()
            if deadline.left(10) < 0:
                yield row | {"skipped": "no time left"}
                continue
            try:
                row |= decoded(name, model, make(), rows, sizes, clock, deadline, batch)
                full = row["tokens_per_second"] if name == FULL else full
                row["times_full"] = row["tokens_per_second"] / full if full else None
            except Exception as error:
                row["error"] = described(error)
            yield row


def decoded(
    name: str, model: Any, cache: Any, rows: int, sizes: Sizes, clock: Clock, deadline: Deadline, batch: int
) -> Row:
    """Median step, seconds of a compression, tokens per second of all texts together, host synchronisations."""
    from decode_speed import Variant, kv_bytes

    variant, interval = Variant(name, None, model, cache), sizes.interval
    fill(cache, sizes, batch, rows, sizes.rows[0], clock.device)
    own, token = Deadline(min(deadline.left(5), PATIENCE)), torch.ones(batch, 1, dtype=torch.long, device=clock.device)
    step(variant, clock, token, 2 if name == FULL else interval + 2, own)  # through a compression
    first, held = variant.compressions[-1:], kv_bytes(cache)
    synchronisations = count_synchronisations(lambda: model(token, cache=cache), clock)
    variant.steps.clear()
    variant.compressions.clear()
    step(variant, clock, token, interval if name == FULL else TIMED * interval, own)
    seconds, times = statistics.median(variant.steps), variant.compressions or first  # if there was no time for more
    compression = statistics.median(times) - seconds if times else 0.0
    return {
        "ms_step": 1e3 * seconds, "ms_compression": 1e3 * compression if times else None,
        "tokens_per_second": batch / (seconds + compression / interval), "steps": len(variant.steps),
        "compressions": len(times), "synchronisations": synchronisations, "kv_bytes": held,
    }  # fmt: skip


def step(variant: Any, clock: Clock, token: torch.Tensor, steps: int, deadline: Deadline) -> None:
    """As `Variant.decode`, for any batch and device; no more than 4 steps once the time is over."""
    for index in range(steps):
        if index >= 4 and deadline.left() < 0:
            return
        before = variant._rounds()
        clock.synchronize()
        start = time.perf_counter()
        variant.model(token, cache=variant.cache)
        clock.synchronize()
        seconds = time.perf_counter() - start
        (variant.steps if variant._rounds() == before else variant.compressions).append(seconds)


def count_synchronisations(call: Call, clock: Clock) -> Row | None:
    """How often the host waits for the device in `call`, and the lines where it does most."""
    if not clock.cuda:
        call()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    places = Counter(f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}" for warning in found)
    return {"count": len(found), "places": dict(places.most_common(8))}
