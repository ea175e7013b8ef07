"""One question about a long text, answered with the full cache and with VaSE at a quarter of the rows, side by side.

The text is the chapter on the `try` statement from the Python reference, as the standard library carries it
(`pydoc_data.topics`).

    python experiments/demo.py [--model smollm2-135m | hub id | folder | file.gguf]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pydoc_data import topics
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvcomp import CompressedCache
from kvcomp.evict import VaSE
from kvcomp.memory import size
from kvcomp.models import SMOLLM2, encode, load

QUESTION = "What does the `finally` clause of a `try` statement do? Explain it in a few sentences."


@dataclass
class Answer:
    """One column of the table."""

    title: str
    text: str
    tokens_per_second: float
    cache: Cache

    def column(self) -> list[str]:
        """Its cells, top to bottom."""
        seen = self.cache.get_seq_length()
        if isinstance(self.cache, CompressedCache):
            memory, capacity = self.cache.memory(), self.cache.compressed[0].storage.capacity
            parts = memory.keys + memory.values, memory.positions + memory.queries
        else:
            stored = sum(
                layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
                for layer in self.cache.layers
            )
            parts, capacity = (stored, 0), seen
        speed = f"{self.tokens_per_second:.1f}"
        return [self.text.strip(), speed, f"{capacity} for {seen} tokens", size(parts[0]), size(parts[1])]


def answer(
    title: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Any, cache: Cache, new: int
) -> Answer:
    """Generates greedily; the rate counts decoding only, from the second token on."""
    clock: list[float] = []

    class Clock:
        """A streamer that notes when each token arrives."""

        def put(self, value: torch.Tensor) -> None:
            clock.append(time.perf_counter())

        def end(self) -> None:
            pass

    output = model.generate(**inputs, cache=cache, max_new_tokens=new, do_sample=False, streamer=Clock())
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return Answer(title, text, (len(clock) - 2) / (clock[-1] - clock[1]), cache)  # the first entry is the prompt


def main(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file, or smollm2-135m.")] = SMOLLM2,
    new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=8)] = 120,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
) -> None:
    """Print both answers, their speed and the bytes of their caches."""
    torch.set_num_threads(threads)
    console = Console()
    with console.status(f"loading {model}"):
        network, tokenizer = load(model)
    inputs = encode(tokenizer, f"{topics.topics['try']}\n\n{QUESTION}")
    prompt = inputs["input_ids"].shape[1]
    console.print(f"\n[bold]{escape(QUESTION)}[/bold]")
    console.print(f"asked after {prompt} tokens of the Python reference; greedy, threads: {threads}\n")
    quarter = VaSE(budget=prompt // 4)
    caches = {
        "full cache (DynamicCache)": DynamicCache(config=network.config),
        f"VaSE, budget {quarter.budget}": CompressedCache(network, quarter),
    }
    with torch.no_grad(), console.status("answering"):
        answers = [answer(title, network, tokenizer, inputs, cache, new_tokens) for title, cache in caches.items()]
    table = Table("", *(one.title for one in answers), show_lines=True, expand=True)
    rows = ["answer", "tokens/s", "rows per head", "keys and values", "positions and queries"]
    for name, *cells in zip(rows, *(one.column() for one in answers), strict=True):
        table.add_row(name, *(escape(cell) for cell in cells))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
