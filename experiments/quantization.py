"""What quantization costs SmolLM2-135M-Instruct: KL to the full cache, top-1 agreement and perplexity, by setting.

The model reads stretches of 2,048 tokens, 64 at a time, as in `perplexity.py`, through a `CompressedCache` that packs
every row but the 64 newest (and the exact ones); nothing is evicted, but for the last lines, where VaSE keeps 512 rows
and each quantizer follows it. Scored is the second half of each stretch. `KL` is
`mean sum_v p(v) (ln p(v) - ln q(v))` in nats per token, `p` with the full cache, `q` with the setting. `bits` are per
element of the rows held at the end, positions and spare room included (in float32 the exact and recent rows take 32).

    python experiments/quantization.py --text math --math-file math500.jsonl --field solution
    python experiments/quantization.py --text topics
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from machine import provenance, write_results
from perplexity import BUDGET, CHUNK, LENGTH, Text, cut, read_text, scored
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from kvcomp import CompressedCache, models, ops
from kvcomp.core import Compressor, Kept, Rows, ValueRows
from kvcomp.evict import StreamingLLM, VaSE
from kvcomp.quant import BitsAndBytes, MixedPrecision, PackedRows

FULL, EVICTED = "full cache", f"VaSE {BUDGET}"
LIMITS = [("K8/V4", FULL, 0.005), ("K4/V4 rotated", FULL, 0.02)]
LIMITS += [(f"{EVICTED} | K8/V4", EVICTED, 0.01), (f"{EVICTED} | K4/V4 rotated", EVICTED, 0.03)]
"""Setting, what it is compared with, and the relative rise of perplexity that it must stay below."""


@dataclass(frozen=True)
class AsTheyAre(PackedRows):
    """Rows that are not packed, to quantize keys or values alone."""

    codes: Tensor

    def unpack(self) -> Rows:
        """The rows."""
        return self.codes


@dataclass(frozen=True)
class OneSide(MixedPrecision):
    """Packs only keys or only values."""

    keys: bool = True

    def pack(self, keys: Rows, values: ValueRows, index: Kept | None = None) -> tuple[PackedRows, PackedRows]:
        """One side packed."""
        packed_keys, packed_values = super().pack(keys, values, index)
        left = ops.rows_at(values if self.keys else keys, index)
        kept = AsTheyAre(left.shape[-1], left.dtype, left)
        return (packed_keys, kept) if self.keys else (kept, packed_values)


@dataclass(frozen=True)
class Run:
    """One stretch read once."""

    kl: float
    agreement: float
    nll: float
    bits: float
    seconds: float


def settings() -> dict[str, Compressor]:
    """Every line of the table; the first is a budget that is never reached."""
    bare: dict[str, Any] = {"exact": 0.0, "sinks": 0}
    plain: dict[str, Compressor] = {
        FULL: StreamingLLM(LENGTH),
        "int8 g64": MixedPrecision(8, group_size=64, **bare),
        "int8, a row a group": MixedPrecision(8, **bare),
        "int4 g64": MixedPrecision(4, **bare),
        "int4 g64, only keys": OneSide(4, **bare),
        "int4 g64, only values": OneSide(4, keys=False, **bare),
        "int4 g64, sinks": MixedPrecision(4, exact=0.0),
        **{f"int4 g64, sinks, {share:.0%} value range": MixedPrecision(4, exact=share) for share in (0.02, 0.05, 0.1)},
        **{f"int4 g64, sinks, {share:.0%} key range": MixedPrecision(4, exact=share, exact_by="key_range")
           for share in (0.05,)},
        **{f"int4 g64, sinks, {share:.0%} random": MixedPrecision(4, exact=share, exact_by="random")
           for share in (0.05, 0.1)},
        "int4 g64, 2% value range": MixedPrecision(4, exact=0.02, sinks=0),
        "int4 g32, sinks": MixedPrecision(4, group_size=32, exact=0.0),
        "K4/V4 rotated": MixedPrecision.k4v4_rotated(),
        "K8/V4": MixedPrecision.k8v4(),
        "K8/V2": MixedPrecision(key_bits=8, value_bits=2, exact=0.0),
        "int2 g64, only values": OneSide(2, keys=False, **bare),
        "int2 g64, only values, sinks": OneSide(2, keys=False, exact=0.0),
        "int2 g64, only values, sinks, 5% value range": OneSide(2, keys=False, exact=0.05),
        "int2 g64, sinks, 20% value range": MixedPrecision(2, exact=0.2),
        "K4/V2 rotated": MixedPrecision(key_bits=4, value_bits=2, rotate_keys=True, exact=0.0),
        "nf4, sinks": BitsAndBytes("nf4"),
        "fp4, sinks": BitsAndBytes("fp4"),
        "8-bit blockwise, sinks": BitsAndBytes("int8"),
    }  # fmt: skip
    vase = VaSE(BUDGET)
    quantizers = {"K8/V4": MixedPrecision.k8v4(), "K4/V4 rotated": MixedPrecision.k4v4_rotated(),
                  "int4 g64, 5% value range": MixedPrecision(4)}  # fmt: skip
    for name, method in quantizers.items():
        plain |= {EVICTED: vase, f"{EVICTED} | {name}": vase | method}
    return plain


def read(model: PreTrainedModel, tokens: Tensor, method: Compressor, seed: int, reference: list[Tensor]) -> Run:
    """Reads one stretch. `reference`: log-probabilities of the full cache, by chunk; filled if it is empty."""
    start = time.perf_counter()
    cache = CompressedCache(model, method, interval=CHUNK, seed=seed)
    fill = not reference
    divergence, agreed, nll, count = 0.0, 0, 0.0, 0
    for index, (logits, targets) in enumerate(scored(model, tokens, cache)):
        logarithms = logits.log_softmax(-1)
        if fill:
            reference.append(logarithms)
        truth = reference[index]
        divergence += float((truth.exp() * (truth - logarithms)).sum())
        agreed += int((truth.argmax(-1) == logarithms.argmax(-1)).sum())
        nll -= float(logarithms.gather(1, targets[:, None]).sum())
        count += len(targets)
    return Run(
        divergence / count, agreed / count, nll / count, cache.memory().bits_per_element, time.perf_counter() - start
    )


def summary(name: str, method: Compressor, runs: list[Run]) -> dict[str, Any]:
    """A line of the table over all stretches."""
    return {
        "setting": name, "compressor": repr(method), "kl": statistics.fmean(run.kl for run in runs),
        "agreement": statistics.fmean(run.agreement for run in runs),
        "perplexity": math.exp(statistics.fmean(run.nll for run in runs)),
        "bits": statistics.fmean(run.bits for run in runs), "runs": [vars(run) for run in runs],
    }  # fmt: skip


def check(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of `LIMITS`: the relative rise of perplexity and whether it stays below."""
    found = {row["setting"]: row["perplexity"] for row in rows}
    rises = [(name, base, found[name] / found[base] - 1, limit) for name, base, limit in LIMITS]
    return [
        {"setting": name, "against": base, "rise": rise, "limit": limit, "holds": rise < limit}
        for name, base, rise, limit in rises
    ]


COLUMNS = ("setting", "KL", "top-1", "perplexity", "x full", "bits")


def cells(row: dict[str, Any], full: float) -> list[str]:
    """The cells of a line."""
    return [
        row["setting"], f"{row['kl']:.4f}", f"{row['agreement']:.1%}", f"{row['perplexity']:.4f}",
        f"{row['perplexity'] / full:.4f}", f"{row['bits']:.2f}",
    ]  # fmt: skip


def sentence(limit: dict[str, Any]) -> str:
    """One limit in words."""
    verdict = "holds" if limit["holds"] else "DOES NOT HOLD"
    return f"{limit['setting']} against {limit['against']}: {limit['rise']:+.2%}, below {limit['limit']:.1%} {verdict}"


def write_markdown(path: Path, label: str, table: list[list[str]], limits: list[dict[str, Any]]) -> None:
    """The table as Markdown beside the JSON file, with what is needed to repeat it."""
    told = json.loads(path.read_text())
    source = told["provenance"]
    lines = [
        f"# Quantization of SmolLM2-135M-Instruct, {label}", "",
        f"`{source['command']}`; seed {told['settings']['seed']}; commit {told['settings']['commit_at_start']}; "
        f"{source['date']}; {source['processor']}, {source['threads']} thread; torch {source['torch']}, transformers "
        f"{source['transformers']}; float32; {told['settings']['minutes']:.1f} minutes.", "",
        (__doc__ or "").split("\n\n")[1].replace("\n", " "), "",
        "| " + " | ".join(COLUMNS) + " |", "| --- " + "| ---: " * (len(COLUMNS) - 1) + "|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table), "",
        *(f"- {sentence(limit)}" for limit in limits),
    ]  # fmt: skip
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def measure(model: PreTrainedModel, stretches: Tensor, seed: int, advance: Callable[[], None]) -> dict[str, list[Run]]:
    """All settings on each stretch; the full cache comes first, as the others are compared with it."""
    runs: dict[str, list[Run]] = {name: [] for name in settings()}
    for index, tokens in enumerate(stretches):
        reference: list[Tensor] = []
        for name, method in settings().items():
            runs[name].append(read(model, tokens, method, seed + index, reference))
            advance()
    return runs


def main(
    text: Annotated[Text, typer.Option(help="what is read")] = Text.math,
    math_file: Annotated[Path | None, typer.Option(help="JSON Lines file for --text math, such as MATH-500")] = None,
    field: Annotated[str, typer.Option(help="field of the math file that is read")] = "solution",
    stretches: Annotated[int, typer.Option(min=1, help="disjoint stretches of 2,048 tokens")] = 4,
    seed: Annotated[int, typer.Option(help="seed of the first stretch")] = 0,
    name: Annotated[str, typer.Option(help="files in experiments/results, without .json and .md")] = "quantization",
) -> None:
    """Measure every setting and write experiments/results/<name>.json and .md."""
    start, commit = time.perf_counter(), provenance()["commit"]
    torch.set_num_threads(1)
    content = read_text(text, math_file, field)
    model, tokenizer = models.load(models.SMOLLM2, dtype="float32")
    tokens, tested = cut(content, tokenizer, stretches), settings()
    with torch.no_grad(), Progress() as progress:
        task = progress.add_task("reading", total=stretches * len(tested))
        runs = measure(model, tokens, seed, lambda: progress.advance(task))
    rows = [summary(method, tested[method], runs[method]) for method in tested]
    limits, label = check(rows), f"math ({field})" if text is Text.math else text.value
    path = write_results(
        name, rows, model=models.SMOLLM2, text=label, tokens_sha256=sha256(tokens.numpy().tobytes()).hexdigest(),
        stretches=stretches, seed=seed, length=LENGTH, chunk=CHUNK, budget=BUDGET, commit_at_start=commit,
        minutes=(time.perf_counter() - start) / 60, limits=limits,
    )  # fmt: skip
    table = [cells(row, rows[0]["perplexity"]) for row in rows]
    write_markdown(path, label, table, limits)
    printed = Table(*COLUMNS, title=f"quantization of SmolLM2-135M-Instruct, {label}")
    for line in table:
        printed.add_row(*line)
    console = Console(width=120)
    console.print(printed, *(sentence(limit) for limit in limits), sep="\n")
    print("written to", path, "and", path.with_suffix(".md"))


if __name__ == "__main__":
    typer.run(main)
