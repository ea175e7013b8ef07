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
        self.model, self.masks = model, {}
        self.cache, self.seen = DynamicCache(config=model.config), 0
        for index, layer in enumerate(model.get_decoder().layers):
            layer.self_attn.register_forward_pre_hook(functools.partial(self._swap, index), with_kwargs=True)

    def _swap(self, index, module, args, kwargs):
        if index in self.masks:
            kwargs["attention_mask"] = self.masks[index]
        return args, kwargs

    def step(self, ids, kept):
        """Logits for `ids` `[batch, new]`; `kept`: by layer, positions `[batch, kv_heads, rows]` visible besides the
        new tokens."""
        batch, new = ids.shape
        total, group = self.seen + new, self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        causal = torch.arange(total) <= torch.arange(self.seen, total)[:, None]
        for index, positions in kept.items():
            visible = torch.zeros(*positions.shape[:2], total + 1, dtype=torch.bool)
            visible.scatter_(2, positions.long() % (total + 1), True)  # padding, -1, lands in the extra column
            visible = visible[:, :, :total]
            visible[:, :, self.seen :] = True
            shown = (visible[:, :, None] & causal).repeat_interleave(group, dim=1)
            lowest = torch.finfo(self.model.dtype).min
            self.masks[index] = torch.zeros(shown.shape, dtype=self.model.dtype).masked_fill(~shown, lowest)
        self.seen = total
        return self.model(ids, cache=self.cache).logits


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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
