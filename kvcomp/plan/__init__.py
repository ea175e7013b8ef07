"""The memory planner: what a model's weights and cache take at a given length, from its config alone."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcomp import checks
from kvcomp.cache import CompressedCache
from kvcomp.core import Compressor
from kvcomp.memory import Memory, size
from kvcomp.models import locate
from kvcomp.pipeline import Pipeline, stages_of
from kvcomp.plan.dry_run import DryRun, Layers
from kvcomp.plan.shapes import extra_rows
from kvcomp.quant.spec import Full, describe

DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "float32": torch.float32, "fp32": torch.float32,
}  # fmt: skip
BROKEN = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises for a config that it cannot read, or that describes no model."""
UNITS = {"B": 1} | {
    prefix + unit: base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
NOTES = (
    "Peak: at the end, or while the last layer still holds all rows of the prompt. Not counted: activations, scores, "
    "copies of a layer's rows while it is compressed, what the framework itself takes. Weights are in the dtype given, "
    "also where the checkpoint is quantized. Padding counts as tokens."
)
UNEVEN = (
    "Heads may differ in how many rows they have packed: some may have up to {rows} more than counted, and the others "
    "then leave slots empty; peak and largest batch have room for these."
)


@dataclass(frozen=True)
class Case:
    """One way to hold the cache of a whole batch.

    `memory`: at the end of the text, as `CompressedCache.memory()` says. `peak`: the most bytes held until then, that
    is at the end, or while the last layer still holds all rows of the prompt; with `extra_rows`. `largest_batch`: how
    many texts fit beside the weights at that peak; None if no memory was given. `extra_rows`: packed rows per head
    that a cache may hold beyond those counted; 0: it holds these bytes for any text.
    """

    compressor: str
    memory: Memory
    peak: int
    largest_batch: int | None
    extra_rows: int


@dataclass(frozen=True)
class Plan:
    """What `plan` found. `weights`: bytes of the `parameters`, shared ones counted once. `cases`: full, eviction,
    quantization, both, or those of them that the compressor has; bytes are of all `batch` texts together."""

    model: str
    dtype: str
    parameters: int
    weights: int
    batch: int
    prompt: int
    length: int
    interval: int
    memory: int | None
    cases: dict[str, Case]

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dicts."""
        plain = asdict(self)
        for name, case in self.cases.items():
            kv = case.memory
            plain["cases"][name]["memory"] |= {"total": kv.total, "compression": kv.compression}
        return plain | {"notes": NOTES}

    def table(self) -> Table:
        """The same for a terminal."""
        asked = f"batch {self.batch}, {self.prompt} + {self.length - self.prompt} tokens, {self.dtype}"
        weights = f"{self.parameters / 1e9:.2f} billion parameters take {size(self.weights)}"
        extra = max(case.extra_rows for case in self.cases.values())
        table = Table("KV cache", title=escape(f"{self.model}: {asked}; {weights}"), caption_justify="left")
        table.caption = escape(" ".join([NOTES, *([UNEVEN.format(rows=extra)] if extra else [])]))
        for name, case in self.cases.items():
            table.add_column(escape(name if name == case.compressor else f"{name}\n{case.compressor}"), justify="right")
        for part in next(iter(self.cases.values())).memory.parts:
            held = [case.memory.parts[part] for case in self.cases.values()]
            if any(held):
                table.add_row(part.replace("_", " "), *(size(count) if count else "" for count in held))
        kv = [case.memory for case in self.cases.values()]
        table.add_section()
        table.add_row("total", *(size(memory.total) for memory in kv))
        table.add_row("full cache / this", *(f"{memory.compression:.2f}" for memory in kv))
        table.add_row("rows per head", *(f"{memory.rows}" for memory in kv))
        table.add_row("peak", *(size(case.peak) for case in self.cases.values()))
        if self.memory is not None:
            batches = (f"{case.largest_batch}" for case in self.cases.values())
            table.add_row(f"largest batch in {_device(self.memory)}", *batches)
        return table


def plan(
    model: str | PreTrainedConfig,
    compressor: Compressor | None,
    batch: int,
    length: int,
    *,
    prompt: int = 1,
    interval: int = 64,
    dtype: str = "bfloat16",
    memory: int | float | str | None = None,
) -> Plan:
    """Bytes of weights and cache after a `prompt` in one forward and single tokens up to `length`, without padding.

    `model`: a hub id, a folder, a `.gguf` file, `smollm2-135m`, the path of a config.json, or a config; no weights are
    loaded. `memory`: bytes, or a text such as 80GB (GB = 10^9) or 24GiB (GiB = 2^30).

    Raises ValueError for numbers below 1, a prompt longer than the text, an unknown dtype or unit, a model that is not
    there, is no causal language model or cannot run on shapes alone, and weights that exceed the memory; and what
    `CompressedCache` raises for models that it does not support.
    """
    _check_text(batch, length, prompt)
    if compressor is not None and not isinstance(compressor, Compressor):
        raise TypeError(f"{compressor!r} is no Compressor: pass for example kvcomp.evict.VaSE(budget=1024), or None")
    room = None if memory is None else parse_bytes(memory)
    network, cases = _empty_model(model, dtype), _cases(compressor or Full())
    _check_model(network, cases, interval, prompt)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    left = None if room is None else _left(room, weights, dtype)
    layers = Layers(network, batch, prompt, length)
    runs: list[tuple[str, Compressor, DryRun]] = [("full", Full(), layers.full())]
    runs += [(name, kind, layers.compressed(kind, interval)) for name, kind in cases]
    return Plan(
        model if isinstance(model, str) else model.model_type,
        str(network.dtype).removeprefix("torch."),
        sum(parameter.numel() for parameter in network.parameters()),
        weights, batch, prompt, length, interval, room,
        {name: _case(kind, run, batch, left) for name, kind, run in runs},
    )  # fmt: skip


def parse_bytes(text: int | float | str) -> int:
    """Bytes of `80GB` (10^9), `24GiB` (2^30), `512 MiB`, ... or a number. Raises ValueError for anything else."""
    if isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text):
        text = f"{int(text)}B"
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", str(text), re.IGNORECASE)
    unit = next((unit for unit in UNITS if found is not None and unit.lower() == found[2].lower()), None)
    if found is None or unit is None or float(found[1]) == 0:
        raise ValueError(f"memory must be a number of {', '.join(UNITS)} above 0, such as 80GB or 24GiB, got {text!r}")
    return int(float(found[1]) * UNITS[unit])


def _device(memory: int) -> str:
    """Bytes as they were probably given."""
    return f"{memory / 1e9:g} GB" if memory % 10**6 == 0 else size(memory)


def _check_text(batch: int, length: int, prompt: int) -> None:
    for name, number in (("batch", batch), ("length", length), ("prompt", prompt)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {number!r}")
    if prompt > length:
        raise ValueError(f"prompt={prompt} tokens are more than length={length}, which counts them too")


def _check_model(network: PreTrainedModel, cases: list[tuple[str, Compressor]], interval: int, prompt: int) -> None:
    if cases:
        CompressedCache(network, cases[-1][1], interval)  # refuses what it does not support
        cases[-1][1].check_prompt(prompt)
    else:
        checks.model_is_supported(network.config, network.config.get_text_config(decoder=True))


def _left(room: int, weights: int, dtype: str) -> int:
    """Bytes beside the weights."""
    if weights > room:
        raise ValueError(
            f"the weights alone take {size(weights)} in {dtype}, {size(weights - room)} more than the memory of "
            f"{_device(room)}: use a device with more, or a smaller model"
        )
    return room - weights


def _case(compressor: Compressor, run: DryRun, batch: int, left: int | None) -> Case:
    largest = None if left is None else left * batch // run.peak  # every tensor has the batch as first axis
    return Case(describe(compressor), run.memory, run.peak, largest, extra_rows(compressor))


def _cases(compressor: Compressor) -> list[tuple[str, Compressor]]:
    stages = stages_of(compressor)
    evicting = tuple(stage for stage in stages if stage.budget is not None)
    packing = tuple(stage for stage in stages if stage.unpacked is not None)
    cases = [("eviction", evicting), ("quantization", packing), ("both", stages if evicting and packing else ())]
    return [(name, Pipeline(part) if len(part) > 1 else part[0]) for name, part in cases if part]


def _empty_model(model: str | PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """The model without memory for its weights."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = _config(model) if isinstance(model, str) else copy.deepcopy(model)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    except BROKEN as error:
        raise ValueError(f"{config.model_type} cannot be planned: {_first_line(error)}") from error


def _config(name: str) -> PreTrainedConfig:
    source, settings = locate(name)
    here = Path(source).exists()
    if (name.endswith(".json") or name.startswith((".", "/"))) and not here:
        raise ValueError(f"there is no file or folder {name}")
    try:
        return AutoConfig.from_pretrained(source, **settings)
    except BROKEN as error:
        what = "cannot read the config of" if here else "cannot find a config for"
        why = "" if here else "it is no local path, and the hub says: "
        raise ValueError(f"{what} {name!r}: {why}{_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What went wrong, without the further lines, which for example list every model there is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__} {told}" if isinstance(error, KeyError) else told
