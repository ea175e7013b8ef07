"""Times of the kernels, of their definitions and of attention over the same rows; of one compression of a layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gpu.cases import (
    DECODED,
    SHORT,
    Case,
    Scene,
    Sizes,
    kernels,
    nbytes,
    pack,
    packed_decode,
    rivals,
    sketched_leverage,
    take_rows,
    unpack,
    value_range,
    window_score,
)
from gpu.clock import GIB, Call, Clock, Deadline, Row, Timing, alternate, described
from kvcomp.core import KV, Observed
from kvcomp.evict import VaSE


def groups(scene: Scene) -> Iterator[tuple[str, str | None, list[Callable[[], Case]]]]:
    """Name, model (None: the query heads do not matter) and makers of the cases that take turns."""
    for model in scene.sizes.models:
        query = scene.queries(model, 1)
        yield "packed_decode", model, [partial(packed_decode, scene, name, query) for name in DECODED]
        yield "window_score", model, [partial(window_score, scene, model)]
    yield "sketched_leverage", None, [partial(sketched_leverage, scene)]
    yield "value_range", None, [partial(value_range, scene)]
    yield "pack 4 bit", None, [partial(pack, scene, 4)]
    yield "pack 4 bit, rotated", None, [partial(pack, scene, 4, rotate=True)]
    yield "pack 8 bit", None, [partial(pack, scene, 8)]
    yield "unpack 4 bit", None, [partial(unpack, scene, 4)]
    yield "take_rows", None, [partial(take_rows, scene)]


def kernel_rows(sizes: Sizes, clock: Clock, deadline: Deadline, copied: float | None) -> Iterator[Row]:
    """A line for each kernel, model, batch size and number of rows; `copied`: bytes per second of a copy."""
    for rows in sizes.rows:
        for batch in sizes.batches:
            about: Row = {"part": "kernels", "batch": batch, "rows": rows}
            try:
                need, free = scratch(sizes, batch, rows), clock.free()
                if need > free:
                    reason = f"needs {need / GIB:.0f} GiB with its definition, {free / GIB:.0f} are free"
                    yield about | {"case": "all", "skipped": reason}
                    continue
                yield from _scene_rows(Scene.of(sizes, clock, batch, rows), about, deadline, copied)
            except Exception as error:
                yield about | {"case": "all", "error": described(error)}


def scratch(sizes: Sizes, batch: int, rows: int) -> int:
    """Bytes that inputs, results and the float32 copies of the definitions take, at most."""
    elements, logits = batch * sizes.kv_heads * rows * sizes.head_dim, batch * max(sizes.models.values()) * SHORT * rows
    return 48 * elements + 16 * logits


def _scene_rows(scene: Scene, about: Row, deadline: Deadline, copied: float | None) -> Iterator[Row]:
    for name, model, makers in groups(scene):
        own = about | {"case": name, "model": model}
        if deadline.left() <= 0:
            yield own | {"skipped": "no time left"}
            continue
        try:
            scene.clock.free()  # what the definitions of the last one left would not fit beside theirs
            yield from [own | row for row in _group_rows(scene, makers, copied)]
        except Exception as error:
            yield own | {"error": described(error)}


def _group_rows(scene: Scene, makers: Sequence[Callable[[], Case]], copied: float | None) -> list[Row]:
    cases = [make() for make in makers]
    decodes = cases[0].operation == "packed_decode"
    others = rivals(cases[0].arguments[0], scene.keys, scene.values) if decodes else {}
    return timed_rows(cases, others, scene.clock, copied)


def timed_rows(cases: Sequence[Case], others: Mapping[str, Call], clock: Clock, copied: float | None) -> list[Row]:
    """The cases, their definitions and `others` in turns; a line for each case."""
    rows: list[Row] = [{"case": case.name} | _checked(case, clock.device) for case in cases]
    calls = dict(others)
    for case, row in zip(cases, rows, strict=True):
        calls |= {} if "error" in row else {case.name: partial(case.run, True)}
        calls[f"{case.name} definition"] = partial(case.run, False)
    timings = alternate(calls, clock, clock.on_device)
    beside = {name: timings[name].ms or timings[name].error for name in others}
    for case, row in zip(cases, rows, strict=True):
        definition = timings[f"{case.name} definition"]
        row |= {"definition_ms": definition.ms, "definition_error": definition.error}
        row |= _speed(row, timings.get(case.name, Timing()), definition.ms, copied)
        row["host_bound"] = clock.cuda and row.get("host_ms", 0.0) > clock.flush_ms
        row |= _over(row, beside) if beside else {}
    return rows


def _checked(case: Case, device: torch.device) -> Row:
    """Runs kernel and definition once: bytes that must move, and how far the results are apart."""
    try:
        kernel = case.has_kernel(device)
        results = case.run(True)
    except Exception as error:
        return {"error": described(error)}
    row: Row = {"kernel": kernel, "bytes": case.reads + nbytes(*results), "difference": None, "wrong": False}
    if kernel:
        try:
            row["difference"] = difference(results, case.run(False))
            row["wrong"] = not row["difference"] <= case.tolerance
        except Exception as error:
            row["difference_error"] = described(error)
    return row


def difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference, as a share of the largest number expected in the same tensor; NaN counts as such."""
    worst = 0.0
    for tensor, wanted in zip(results, expected, strict=True):
        apart = largest = 0.0
        for row, wanted_row in zip(tensor, wanted, strict=True):  # a batch row at a time, in float32
            if row.numel():
                gap = (row.float() - wanted_row.float()).abs().amax().item()
                apart = gap if gap != gap else max(apart, gap)
                largest = max(largest, wanted_row.float().abs().amax().item())
        worst = max(worst, apart / (largest or 1.0)) if apart == apart else apart
    return worst


def _speed(row: Row, timing: Timing, definition: float | None, copied: float | None) -> Row:
    if timing.ms is None:
        return {"ms": None, "error": row.get("error") or timing.error}
    floor = None if copied is None else 1e3 * row["bytes"] / copied
    return {
        "ms": timing.ms, "host_ms": statistics.median(timing.host), "repeats": len(timing.device),
        "floor_ms": floor, "share": None if floor is None else floor / timing.ms,
        "times_definition": None if definition is None else definition / timing.ms,
    }  # fmt: skip


def _over(row: Row, beside: Mapping[str, float | str | None]) -> Row:
    """`beside`, and how many times faster than the best sdpa, the best flash-attn and the best of all."""

    def faster(prefix: str) -> float | None:
        found = [ms for name, ms in beside.items() if name.startswith(prefix) and isinstance(ms, float)]
        return min(found) / row["ms"] if found and row["ms"] else None

    return {"beside": beside} | {f"times_{prefix or 'best'}": faster(prefix) for prefix in ("sdpa", "flash", "")}


def compression_rows(sizes: Sizes, clock: Clock) -> Iterator[Row]:
    """One compression of one layer by VaSE beside its attention of one decode step; host time counts here."""
    for model in sizes.models:
        for batch in sizes.batches:
            about: Row = {"part": "compression", "model": model, "batch": batch}
            about |= {"case": f"VaSE({sizes.budget})", "rows": sizes.budget + sizes.interval}
            try:
                yield about | _compression(Scene.of(sizes, clock, batch, about["rows"]), model)
            except Exception as error:
                yield about | {"error": described(error)}


def _compression(scene: Scene, model: str) -> Row:
    kv = KV(scene.keys, scene.values, scene.positions(0, scene.rows))
    method, seen = VaSE(scene.sizes.budget), Observed(queries=scene.queries(model, SHORT))

    def compress(by_kernel: bool) -> KV:
        with kernels(by_kernel):
            return method.compress(kv, seen)

    attention = rivals(scene.queries(model, 1), scene.keys, scene.values)["sdpa folded"]
    calls: dict[str, Call] = {"ms": partial(compress, True), "definition_ms": partial(compress, False)}
    found = alternate(calls | {"attention_ms": attention}, scene.clock, scene.clock.wall)
    row: Row = {name: timing.ms for name, timing in found.items()}
    row["error"] = next((timing.error for timing in found.values() if timing.error), None)
    row["over_attention"] = row["ms"] / row["attention_ms"] if row["ms"] and row["attention_ms"] else None
    return row
