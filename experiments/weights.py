"""Attention weights of the full cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def attention_weights(model: PreTrainedModel, ids: Tensor, **passed: Any) -> list[Tensor]:
    """By layer `[batch, kv_heads, group, queries, rows]`; the model attends as before afterwards."""
    before, heads = model.config._attn_implementation, model.config.num_key_value_heads
    model.set_attn_implementation("eager")  # the one that returns weights
    try:
        found = model(ids, output_attentions=True, logits_to_keep=1, **passed).attentions
    finally:
        model.set_attn_implementation(before)
    return [layer.unflatten(1, (heads, -1)) for layer in found]
