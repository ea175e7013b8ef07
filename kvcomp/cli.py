"""`kvcomp`: the command line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcomp.core import Compressor
from kvcomp.evict import METHODS

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

[bold]budget[/bold] counts every row that is kept after a compression; [bold]interval[/bold] more gather until the next.
`kvcomp methods` lists the methods."""


@app.callback()
def main() -> None:
    """Keep the KV cache of a reasoning model at a fixed size."""


@app.command(epilog=EXAMPLES)
def generate(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file, or smollm2-135m.")],
    prompt: Annotated[str | None, typer.Option(help="What to ask; - reads standard input.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A text file to ask instead.", exists=True, dir_okay=False)
    ] = None,
    method: Annotated[
        str, typer.Option(help=f"One of {', '.join(METHODS)}; or full: nothing is evicted.")
    ] = "vase-attnv",
    budget: Annotated[int, typer.Option(help="Rows kept per KV head.")] = 1024,
    interval: Annotated[int, typer.Option(help="New tokens between two compressions.")] = 64,
    protect_prompt: Annotated[bool, typer.Option(help="Never evict a prompt token.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method, name=value; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes eviction noise and sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="With a temperature: mass of the tokens to draw from.", min=0.0, max=1.0)
    ] = 1.0,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template if it has one.")] = True,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    attention: Annotated[str, typer.Option(help="sdpa, eager or flash_attention_2.")] = "sdpa",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")] = "cpu",
) -> None:
    """Answer a prompt with a compressed cache. The answer goes to standard output, the memory it took to standard
    error."""
    try:
        text = _prompt_text(prompt, prompt_file)
        compressor = build_method(method, budget, protect_prompt, set_ or [])
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
        )
        settings = {"max_new_tokens": max_new_tokens, **sampling}
        _generate(text, compressor, (model, dtype, attention, device), interval, seed, chat, settings)
    except (ValueError, NotImplementedError) as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from error


@app.command()
def methods() -> None:
    """List the methods of --method with their settings."""
    table = Table("method", "settings at budget 1024", "what it keeps")
    for name, build in METHODS.items():
        compressor = build(budget=1024)
        summary = " ".join((type(compressor).__doc__ or "").split("\n\n")[0].split())
        table.add_row(name, escape(repr(compressor)), escape(summary))
    Console().print(table)


def build_method(name: str, budget: int, protect_prompt: bool, settings: list[str]) -> Compressor | None:
    """The compressor that the options describe; None for `full`. Raises ValueError for an unknown name or setting."""
    if name == "full":
        if settings or protect_prompt:
            raise ValueError("--method full evicts nothing, so it takes neither --set nor --protect-prompt")
        return None
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; choose one of {', '.join(METHODS)}, or full")
    values = dict(_setting(text) for text in settings)
    try:
        return METHODS[name](budget=budget, protect_prompt=protect_prompt, **values)
    except TypeError as error:
        raise ValueError(
            f"{name} does not take the settings {sorted(values)}: {error}; see `kvcomp methods`"
        ) from error


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--set takes name=value, got {text!r}")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return name, value


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
