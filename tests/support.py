"""Tiny random models of every family, and the masked oracle: the truth for an evicting cache."""

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from kvcomp import CompressedCache

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
    "pad_token_id": None, "eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 8192,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 3}, sliding_window=8, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": lambda: Phi3Config(**SHAPE),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, num_local_experts=2, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
FAMILIES = list(CONFIGS)


@functools.cache
def _weights(family, layers):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    if layers:
        config.num_hidden_layers = layers
        config.layer_types = ["full_attention"] * layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # GPT-OSS leaves them uninitialised
            torch.nn.init.normal_(parameter)
    return model.requires_grad_(False)


def tiny(family="qwen3", attention=None, layers=None, dtype=torch.float32):
    """A fresh copy of a tiny model; sdpa where the family has it."""
    model = copy.deepcopy(_weights(family, layers)).to(dtype)
    model.set_attn_implementation(attention or ("eager" if family == "gpt_oss" else "sdpa"))
    return model


def tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths, seed=1):
    """Ids and mask `[batch, longest]`; padding is token 0."""
    longest = max(lengths)
    ids, mask = tokens(len(lengths), longest, seed=seed), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return ids, mask


def generate(model, ids, mask=None, new=24, **settings):
    settings = {"do_sample": False, "max_new_tokens": new} | settings
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **settings)


class MaskedOracle:
    """A full DynamicCache on an untouched copy of the model, with masks that hide what a compressed cache has
    evicted."""

    def __init__(self, model):
        self.model, self.masks, self.pads = model, {}, None
        self.cache, self.seen = DynamicCache(config=model.config), 0
        for index, layer in enumerate(model.get_decoder().layers):
            layer.self_attn.register_forward_pre_hook(functools.partial(self._swap, index), with_kwargs=True)

    def _swap(self, index, module, args, kwargs):
        if index in self.masks:
            kwargs["attention_mask"] = self.masks[index]
        return args, kwargs

    def step(self, ids, kept, **inputs):
        """Logits for `ids` `[batch, new]`; `kept`: by layer, positions `[batch, kv_heads, rows]` visible besides the
        new tokens."""
        batch, new = ids.shape
        total, group = self.seen + new, self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        causal = torch.arange(total) <= torch.arange(self.seen, total)[:, None]
        for index, positions in kept.items():
            if self.pads is not None:
                positions = torch.where(positions < 0, -1, positions + self.pads[:, None, None])
            visible = torch.zeros(*positions.shape[:2], total + 1, dtype=torch.bool)
            visible.scatter_(2, positions.long() % (total + 1), True)  # padding, -1, lands in the extra column
            visible = visible[:, :, :total]
            visible[:, :, self.seen :] = True
            if self.pads is not None:
                visible &= (torch.arange(total) >= self.pads[:, None])[:, None]
            shown = (visible[:, :, None] & causal).repeat_interleave(group, dim=1)
            lowest = torch.finfo(self.model.dtype).min
            self.masks[index] = torch.zeros(shown.shape, dtype=self.model.dtype).masked_fill(~shown, lowest)
        self.seen = total
        return self.model(ids, cache=self.cache, **inputs).logits


class WitnessedCache(CompressedCache):
    """A CompressedCache beside which an oracle runs: `errors` has the largest relative error of every forward."""

    def __init__(self, model, reference, *settings, **more):
        super().__init__(model, *settings, **more)
        self.oracle, self.errors = MaskedOracle(reference), []
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, module, args, inputs):
        self.kept = kept_positions(self)

    def _after(self, module, args, inputs, output):
        ids, new = inputs["input_ids"], output.logits.shape[1]
        mask = inputs.get("attention_mask")
        if self.oracle.pads is None or mask is not None:  # a prompt in chunks shows its padding bit by bit
            self.oracle.pads = torch.zeros(len(ids), dtype=torch.long) if mask is None else (mask == 0).sum(-1)
            self.kept = {index: rows.expand(len(ids), -1, -1) for index, rows in self.kept.items()}
        passed = {name: inputs.get(name) for name in ("position_ids", "attention_mask")}
        reference = self.oracle.step(ids, self.kept, **passed)[:, -new:]
        real = torch.arange(self.oracle.seen - new, self.oracle.seen) >= self.oracle.pads[:, None]
        self.errors.append(float(((output.logits - reference).abs().amax(-1) * real).max() / reference.abs().max()))

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.oracle.cache.reorder_cache(beam_idx)
        self.oracle.pads = self.oracle.pads[beam_idx]

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self.oracle.cache.crop(tokens_to_remove)
        self.oracle.seen += tokens_to_remove

    def activate_past_recording(self):
        super().activate_past_recording()
        self.oracle.cache.activate_past_recording()


def kept_positions(cache):
    """By layer, a copy of the positions stored now."""
    return {
        layer.layer_idx: layer.positions.clone() if layer.is_initialized else torch.empty(1, 2, 0)
        for layer in cache.compressed
    }


def relative_error(logits, reference):
    return float((logits - reference).abs().max() / reference.abs().max())


def run_python(code):
    """Runs `code` in a fresh process without the type checks of this suite."""
    tests = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests.parent / "kernels", tests))),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
