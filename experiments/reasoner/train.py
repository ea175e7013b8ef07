"""Train the small reasoning model: a Qwen3 of 0.8 M parameters that solves both families of `kvcomp.eval.chains`.

    python experiments/reasoner/train.py --out experiments/reasoner/model

Problems start small, with three rules or definitions and a short chain: there the model learns to look facts up. They
grow by a level whenever it predicts `GROW` of the tokens of fresh problems right; at full size `--final` batches follow
while the learning rate falls to zero. Every batch is drawn from seeds of its own number, so a run that is stopped goes
on from its checkpoint as if it had not been. Problems for evaluation use seeds below `kvcomp.eval.chains.TRAINING`.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kvcomp.eval.chains import FAMILIES, TRAINING, WORDS, Chain, derivations, registers

BATCH = 8
"""Problems of each family in a batch."""
RATE = 2e-3
WARM_UP = 100
GROW = 0.95
LEVELS = 8
"""Problems of the last level have the size of those that are evaluated."""


def build() -> Qwen3ForCausalLM:
    """The untrained model: 4 layers, hidden size 128, 4 query heads and 2 KV heads of 32 channels."""
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def problem(family: str, seed: int, level: int) -> Chain:
    """A problem of `level` 0 (small) to `LEVELS - 1` (the whole size)."""
    small = LEVELS - 1 - level
    if family == "registers":
        return registers(seed, steps=66 - 6 * small, rules=10 - small, count=6 - small // 2)
    return derivations(seed, steps=76 - 7 * small, count=10 - small, distractors=5 - small // 2)


def batch(number: int, level: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels `[2 * BATCH, tokens]` of batch `number`; labels are -100 at the prompt and at padding."""
    ids = {word: i for i, word in enumerate(WORDS)}
    chains = [problem(family, TRAINING + number * BATCH + i, level) for family in FAMILIES for i in range(BATCH)]
    texts = [[ids[word] for word in one.prompt + one.chain] for one in chains]
    width = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    labels = tokens.masked_fill(tokens == 0, -100)
    for row, one in enumerate(chains):
        labels[row, : len(one.prompt)] = -100
    return tokens, labels


class Schedule:
    """Size of the problems and learning rate; all of it is in `state`."""

    def __init__(self, final: int) -> None:
        self.state = {"number": 0, "level": 0, "accuracy": 0.0, "left": final, "tokens": 0, "seconds": 0.0}
        self.final = final

    def rate(self) -> float:
        """Warm-up, constant, then linear decay over the final batches."""
        return RATE * min(1.0, (self.state["number"] + 1) / WARM_UP) * min(1.0, self.state["left"] / (0.8 * self.final))

    def advance(self, accuracy: float, tokens: int) -> None:
        """Count a batch; larger problems if the running accuracy allows."""
        state = self.state
        state["number"] += 1
        state["tokens"] += tokens
        state["accuracy"] = 0.9 * state["accuracy"] + 0.1 * accuracy
        if state["level"] == LEVELS - 1:
            state["left"] -= 1
        elif state["accuracy"] > GROW:
            state["level"] += 1
            state["accuracy"] -= 0.02


def train(
    out: Annotated[Path, typer.Option(help="Folder of the model; checkpoint.pt lies beside it while training.")],
    final: Annotated[int, typer.Option(help="Batches of problems of the whole size.")] = 800,
    minutes: Annotated[float, typer.Option(help="Stop after this time; the same command goes on.")] = 60.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Train, or go on training, and write the model."""
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = Schedule(final)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out.parent / f"{out.name}.checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.state = saved["state"]
    begin, spent = time.monotonic(), schedule.state["seconds"]
    while schedule.state["left"] > 0 and time.monotonic() - begin < 60 * minutes:
        accuracy, tokens = step(model, optimizer, schedule, device)
        schedule.advance(accuracy, tokens)
        state = schedule.state
        state["seconds"] = spent + time.monotonic() - begin
        if state["number"] % 50 == 0 or state["left"] <= 0:
            typer.echo(json.dumps({name: round(value, 4) for name, value in state.items()}))
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
            torch.save(saved, checkpoint)
    if schedule.state["left"] <= 0:
        write(model, out, schedule.state)


def step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, schedule: Schedule, device: str
) -> tuple[float, int]:
    """One batch; returns the share of tokens predicted right and the number of tokens."""
    tokens, labels = (x.to(device) for x in batch(int(schedule.state["number"]), int(schedule.state["level"])))
    for group in optimizer.param_groups:
        group["lr"] = schedule.rate()
    logits, wanted = model(tokens).logits[:, :-1], labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = (logits.argmax(-1) == wanted)[wanted >= 0]
    return float(right.float().mean()), tokens.numel()


def write(model: Qwen3ForCausalLM, out: Path, state: dict[str, float]) -> None:
    """The folder that `from_pretrained` reads, and what made it."""
    model.save_pretrained(out)
    tokenizer().save_pretrained(out)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    facts = {**state, "sha256": digest, "torch": torch.__version__, "threads": torch.get_num_threads()}
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(train)
