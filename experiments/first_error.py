"""Where a chain first goes wrong under a method: which row the full cache would have read there, and when it was lost.

python experiments/first_error.py --method snapkv --family registers [--problems 100]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from reasoning import BATCH, INTERVAL, Reasoner
from rich.console import Console
from rich.table import Table
from studies import method
from torch import Tensor
from weights import attention_weights

from kvcomp import CompressedCache
from kvcomp.core import Compressor
from kvcomp.eval.chains import NAMES
from kvcomp.eval.run import Work
from kvcomp.models import REASONER


@dataclass(frozen=True)
class Loss:
    """The first wrong word of a chain.

    `expected`, `given`: the words; `position` of the wrong one. In the head `layer`, `head` (a KV head) that lost the
    most attention: the lost row's `word`, its position `row`, the `weight` the full cache gives it (mean over the
    group), and `lost`, the position of the newest token when it was evicted.
    """

    problem: str
    position: int
    expected: str
    given: str
    layer: int
    head: int
    word: str
    row: int
    weight: float
    lost: int


def first_losses(reasoner: Reasoner, family: str, compressor: Compressor, seed: int = 0) -> list[Loss | None]:
    """One entry a problem; None where the chain is right. The right chain is fed, so that each first error is the
    method's own."""
    work = reasoner.work[family]
    found: list[Loss | None] = []
    for start in range(0, len(work), BATCH):
        found += _batch(reasoner, work[start : start + BATCH], compressor, seed)
    return found


def _batch(reasoner: Reasoner, batch: list[Work], compressor: Compressor, seed: int) -> list[Loss | None]:
    model, tokenizer = reasoner.model, reasoner.tokenizer
    ids = torch.tensor([[*one.ids, *tokenizer(one.problem.answer).input_ids] for one in batch])
    prompt, length = len(batch[0].ids), ids.shape[1]
    cache = CompressedCache(model, compressor, INTERVAL, seed)
    evicted = [torch.full((*_heads(model, batch), length), length) for _ in cache.layers]
    wrong: dict[int, tuple[int, int, list[Tensor]]] = {}
    for stop in range(prompt, length):
        logits = model(ids[:, 0 if stop == prompt else stop - 1 : stop], cache=cache, logits_to_keep=1).logits[:, -1]
        picked = logits.argmax(-1)
        for row in (picked != ids[:, stop]).nonzero()[:, 0].tolist():
            wrong.setdefault(row, (stop, int(picked[row]), [one[row].clone() for one in evicted]))
        for gone, layer in zip(evicted, cache.compressed, strict=True):
            _note(gone, layer.positions, stop)
    weights = attention_weights(reasoner.model, ids[sorted(wrong)]) if wrong else []
    attention = [layer.mean(2) for layer in weights]  # over the group
    place = {row: index for index, row in enumerate(sorted(wrong))}
    return [
        _loss(reasoner, one, ids[row], wrong[row], [layer[place[row]] for layer in attention]) if row in wrong else None
        for row, one in enumerate(batch)
    ]


def _heads(model: Any, batch: list[Work]) -> tuple[int, int]:
    return len(batch), model.config.num_key_value_heads


def _note(gone: Tensor, positions: Tensor | None, stop: int) -> None:
    """Writes `stop` where a row is no longer stored for the first time."""
    assert positions is not None
    stored = torch.zeros_like(gone, dtype=torch.bool)
    stored.scatter_(2, positions.long(), True)
    older = torch.arange(gone.shape[2]) < stop
    gone[~stored & older & (gone > stop)] = stop


def _loss(reasoner: Reasoner, one: Work, ids: Tensor, wrong: tuple[int, int, list[Tensor]], full: list[Tensor]) -> Loss:
    stop, picked, evicted = wrong
    weights = torch.stack([layer[:, stop - 1, :stop] for layer in full])
    gone = torch.stack([layer[:, :stop] for layer in evicted])
    missing = weights * (gone < stop)
    layer, head, row = (int(index) for index in torch.unravel_index(missing.argmax(), missing.shape))
    words = reasoner.tokenizer.convert_ids_to_tokens
    return Loss(
        one.problem.id, stop, words(int(ids[stop])), words(picked), layer, head, words(int(ids[row])), row,
        round(float(missing[layer, head, row]), 3), int(gone[layer, head, row]),
    )  # fmt: skip


def kind(word: str) -> str:
    """What a word of a chain is: a number, a constant, a counter, a name, a key, or itself."""
    if word.lstrip("#+").isdigit():
        return {"#": "counter", "+": "constant"}.get(word[0], "number")
    return "name" if word in NAMES else "key" if word[:-1] in NAMES else word


def main(
    name: Annotated[str, typer.Option("--method", help="A method of kvcomp.evict.METHODS.")],
    family: Annotated[str, typer.Option(help="registers or derivations.")] = "registers",
    problems: Annotated[int, typer.Option(help="How many.", min=1)] = 100,
    protect_prompt: Annotated[bool, typer.Option(help="Never evict a prompt token.")] = False,
    model: Annotated[str, typer.Option(help="A model that solves both families.")] = REASONER,
) -> None:
    """Print what was lost most often where chains first go wrong."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    reasoner = Reasoner.load(model, 0, problems, "float32")
    compressor = method(name, protect_prompt).compressor(reasoner.length(family))
    assert compressor is not None
    losses = [loss for loss in first_losses(reasoner, family, compressor) if loss is not None]
    typer.echo(f"{len(losses)} of {problems} chains go wrong; examples: {losses[:3]}")
    table = Table("expected", "lost row", "layer", "head", "chains", "age when lost", "steps from loss to need")
    groups = Counter((kind(one.expected), kind(one.word), one.layer, one.head) for one in losses)
    for key, count in groups.most_common(12):
        members = [one for one in losses if (kind(one.expected), kind(one.word), one.layer, one.head) == key]
        age = sum(one.lost - one.row for one in members) / count
        wait = sum(one.position - one.lost for one in members) / count
        table.add_row(*map(str, key), str(count), f"{age:.0f}", f"{wait:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
