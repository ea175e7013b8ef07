"""`kvcomp`: the command line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcomp.core import Compressor
from kvcomp.eval import cli as eval_cli
from kvcomp.evict import METHODS
from kvcomp.methods import build_method
from kvcomp.report import cli as report_cli
from kvcomp.report.cli import plain_errors

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Keep the KV cache of a reasoning model at a fixed size. Start with [bold]kvcomp generate --help[/bold].",
)
console = Console(stderr=True)

EXAMPLES = """[bold]Examples[/bold]

A question, with a cache of 1,024 rows per head however long the answer gets:

  kvcomp generate --model Qwen/Qwen3-0.6B --prompt "How many primes are below 1000?" --budget 1024

A long file as the prompt, every row of it kept, the answer sampled:

  kvcomp generate --model ./my-model --prompt-file notes.txt --budget 8192 --protect-prompt --temperature 0.6

Without the hub, on the small model of a PyPI package, another method and one of its settings:

  kvcomp generate --model smollm2-135m --prompt "What is a prime?" --method snapkv --budget 256 --set window=32

The rows that are kept in few bits, keys in 8 and values in 4; with --method full that alone:

  kvcomp generate --model smollm2-135m --prompt "What is a prime?" --budget 256 --quantize k8v4

[bold]budget[/bold] counts every row that is kept after a compression; [bold]interval[/bold] more gather until the next.
`kvcomp methods` lists the methods."""

PLAN_EXAMPLES = """[bold]Examples[/bold]

How many chains of thought of 32,768 tokens fit on a device of 80 GB:

  kvcomp plan --model Qwen/Qwen3-4B --batch 16 --length 32768 --memory 80GB --budget 4096 --quantize k8v4

Without the hub, after a prompt of 2,000 tokens, for another program:

  kvcomp plan --model ./my-model/config.json --prompt 2000 --length 8192 --dtype fp16 --json

GB is 10^9 bytes, GiB is 2^30. `--method full` leaves eviction out, `--quantize full` quantization."""


PromptFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="A text file to ask instead.", exists=True, dir_okay=False)
]
Method: TypeAlias = Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}; or full: nothing is evicted.")]
Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the method, name=value; repeatable.")
]
Quantize: TypeAlias = Annotated[
    str | None, typer.Option(help="How to pack the rows kept: k8v4, k4v4_rotated, int8, 'int4 g64 exact=0.05', ...")
]
TopP: TypeAlias = Annotated[
    float, typer.Option(help="With a temperature: mass of the tokens to draw from.", min=0.0, max=1.0)
]


@app.callback()
def main() -> None:
    """Keep the KV cache of a reasoning model at a fixed size."""


@app.command(epilog=EXAMPLES)
def generate(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file, or smollm2-135m.")],
    prompt: Annotated[str | None, typer.Option(help="What to ask; - reads standard input.")] = None,
    prompt_file: PromptFile = None,
    method: Method = "vase-attnv",
    budget: Annotated[int, typer.Option(help="Rows kept per KV head.")] = 1024,
    interval: Annotated[int, typer.Option(help="New tokens between two compressions.")] = 64,
    protect_prompt: Annotated[bool, typer.Option(help="Never evict a prompt token.")] = False,
    set_: Settings = None,
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Fixes eviction noise and sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    top_p: TopP = 1.0,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template if it has one.")] = True,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    attention: Annotated[str, typer.Option(help="sdpa, eager or flash_attention_2.")] = "sdpa",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
) -> None:
    """Answer a prompt with a compressed cache. The answer goes to standard output, the memory it took to standard
    error."""
    with plain_errors(console):
        text = _prompt_text(prompt, prompt_file)
        compressor = build_method(method, budget, protect_prompt, set_ or [], quantize)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
        )
        settings = {"max_new_tokens": max_new_tokens, **sampling}
        _generate(text, compressor, (model, dtype, attention, device), interval, seed, chat, settings)


@app.command(epilog=PLAN_EXAMPLES)
def plan(
    model: Annotated[str, typer.Option(help="Hub id, folder, config.json, .gguf file, or smollm2-135m.")],
    length: Annotated[int, typer.Option(help="Tokens of each text, prompt and answer.")],
    batch: Annotated[int, typer.Option(help="Texts at a time.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens that are read in the first forward.")] = 1,
    memory: Annotated[str | None, typer.Option(help="What the device has: 80GB, 24GiB, ...")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32, of weights and cache.")] = "bf16",
    method: Annotated[str, typer.Option(help="A method of `kvcomp methods`; or full: nothing is evicted.")] = (
        "vase-attnv"
    ),
    budget: Annotated[int, typer.Option(help="Rows kept per KV head.")] = 4096,
    interval: Annotated[int, typer.Option(help="New tokens between two compressions.")] = 64,
    set_: Settings = None,
    quantize: Annotated[str, typer.Option(help="How to pack rows; full: not at all.")] = "k8v4",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say what weights and KV cache take, and how many texts fit, from the model's config alone."""
    from kvcomp.plan import plan as make

    with plain_errors(console):
        compressor = build_method(method, budget, False, set_ or [], quantize)
        found = make(model, compressor, batch, length, prompt=prompt, interval=interval, dtype=dtype, memory=memory)
    print(json.dumps(found.to_json(), indent=2)) if as_json else Console().print(found.table())


@app.command()
def methods() -> None:
    """List the methods of --method with their settings."""
    table = Table("method", "settings at budget 1024", "what it keeps")
    for name, build in METHODS.items():
        compressor = build(budget=1024)
        summary = " ".join((type(compressor).__doc__ or "").split("\n\n")[0].split())
        table.add_row(name, escape(repr(compressor)), escape(summary))
    Console().print(table)


app.command(epilog=report_cli.EXAMPLES)(report_cli.report)
app.command("eval", epilog=eval_cli.EXAMPLES)(eval_cli.evaluate)
app.command()(eval_cli.compare)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give either --prompt or --prompt-file")
    try:
        text = prompt_file.read_text("utf-8") if prompt_file else sys.stdin.read() if prompt == "-" else prompt or ""
        text.encode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"{prompt_file or 'the prompt'} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _generate(
    text: str,
    compressor: Compressor | None,
    source: tuple[str, str, str, str],
    interval: int,
    seed: int,
    chat: bool,
    settings: dict[str, Any],
) -> None:
    from transformers import DynamicCache, TextStreamer, set_seed

    from kvcomp import CompressedCache
    from kvcomp.models import encode, load

    with console.status(f"loading {source[0]}"):
        network, tokenizer = load(*source)
        inputs = encode(tokenizer, text, chat).to(network.device)
    if compressor is None:
        cache: Any = DynamicCache(config=network.config)
    else:
        cache = CompressedCache(network, compressor, interval, seed)
    set_seed(seed)
    start = time.perf_counter()
    with torch.no_grad():
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        output = network.generate(**inputs, cache=cache, streamer=streamer, **settings)
    seconds, new = time.perf_counter() - start, output.shape[1] - inputs["input_ids"].shape[1]
    held = f"KV cache: {cache.memory()}" if compressor else f"KV cache: full, {cache.get_seq_length()} tokens"
    console.print(f"{new} tokens in {seconds:.1f} s, prompt included. {held}", soft_wrap=True)


if __name__ == "__main__":
    app()
