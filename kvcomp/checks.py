"""Everything that is refused, with the number and the remedy, before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvcomp.cache import CompressedCache
    from kvcomp.layer import CompressedLayer

RECORD = "call cache.activate_past_recording() before the forward whose tokens may be removed"


def model_is_supported(config: Any, text_config: Any) -> None:
    """Raises NotImplementedError for encoder-decoder models, latent attention (MLA) and layers that share keys."""
    name = text_config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name} is an encoder-decoder model; kvcomp supports decoder-only models")
    rank = getattr(text_config, "kv_lora_rank", None)
    if rank is not None:
        raise NotImplementedError(
            f"{name} stores one latent per token (MLA, kv_lora_rank={rank}) instead of keys and values per head; "
            "kvcomp cannot compress that, use transformers' DynamicCache"
        )
    if getattr(text_config, "cross_attention_layers", None):
        raise NotImplementedError(f"{name} has cross-attention layers; kvcomp supports self-attention only")
    if "reuse" in (getattr(text_config, "kv_sharing_modes", None) or ()):
        raise NotImplementedError(f"{name} has layers that reuse the keys of others; use transformers' DynamicCache")


def kv_shapes(config: Any) -> list[tuple[int, int]]:
    """KV heads and channels of a key, each pair once; more than one where layers differ."""
    layers = getattr(config, "per_layer_config", None) or [config]
    return sorted(
        {
            (
                getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
                getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
            )
            for layer in layers
        }
    )


def call(cache: CompressedCache, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError for a forward with these arguments that `cache` would answer wrongly."""
    tokens = tokens_of(inputs)
    if tokens is None:
        return  # the model says so itself
    (count, new), seen, layer = tokens.shape[:2], cache.compressed[0].count.seen, cache.compressed[0]
    if inputs.get("use_cache") is False:
        raise ValueError(
            "use_cache=False feeds the whole text at every step, so no cache may be passed: set use_cache=True"
        )
    if new == 0:
        raise ValueError(
            f"there are no new tokens: the cache has seen {seen} tokens and the prompt is not longer; pass the whole "
            "text with its continuation, or call cache.reset() before another text"
        )
    batch(layer, count)
    mask(inputs.get("attention_mask"), seen, new)
    for each in cache.compressed:
        whole(each)
    positions = text_positions(inputs.get("position_ids"))
    newest = torch.full((1,), seen + new - 1) if positions is None else positions.reshape(-1, new)[:, -1]
    if layer.count.prompt_open and (seen == 0 or new > 1) and not layer.record_past:  # drafts are no prompt
        cache.compressor.check_prompt(min(int(newest.max()) + 1, seen + new))
    if seen and new > 1:
        continues(layer, newest)


def tokens_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """`input_ids` or `inputs_embeds`: batch and new tokens are their first axes."""
    return inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """Positions in the text `[batch, new]`; models with several kinds of position give these first."""
    return position_ids[0] if position_ids is not None and position_ids.ndim == 3 else position_ids


def not_training(module: Any) -> None:
    """Raises ValueError for a forward whose gradients the cache would cut: it stores rows without their graph."""
    if module.training and torch.is_grad_enabled():
        raise ValueError("a CompressedCache stores rows without gradients: call model.eval(), or use torch.no_grad()")


def whole(layer: CompressedLayer) -> None:
    """Raises ValueError if a compression of the layer was interrupted while it was written."""
    if layer.torn:
        raise ValueError(
            f"a compression of layer {layer.layer_idx} was interrupted, its rows are lost: call cache.reset(), or load "
            "a saved cache"
        )


def length(layer: Any) -> int:
    """Tokens that a layer has seen. Raises ValueError for a layer that cannot forget some of them again."""
    if not hasattr(layer, "get_seq_length"):
        raise ValueError(f"{type(layer).__name__} has no earlier state to go back to")
    return int(layer.get_seq_length())


def batch(layer: CompressedLayer, count: int) -> None:
    """Raises ValueError for a batch of another size than the one stored."""
    if layer.is_initialized and count != layer.batch_size:
        raise ValueError(
            f"the cache holds a batch of {layer.batch_size}, got {count}: call cache.batch_repeat_interleave(n) or "
            "cache.batch_select_indices(rows) first, or cache.reset() for another text"
        )


def mask(attention_mask: Any, seen: int, new: int) -> None:
    """Raises ValueError for a 2-D mask of the wrong length or with padding elsewhere than on the left."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return
    if attention_mask.shape[1] != seen + new:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but the cache has seen {seen} and {new} are new: "
            f"pass a mask of {seen + new} columns, or None if nothing is padded"
        )
    if new > 1 and bool((attention_mask[:, 1:] < attention_mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask has a 0 after a 1: only left padding is supported, as evicted rows leave no column to "
            "hide. Set tokenizer.padding_side='left'; if you passed no mask, generate() made one from the pad tokens "
            "in your "
            "text: pass it"
        )


def continues(layer: CompressedLayer, newest: Tensor) -> None:
    """Raises ValueError if tokens that end at positions `newest` do not go beyond what has been seen."""
    stored = layer.storage.newest
    if bool((newest.to(stored.device).expand_as(stored) <= stored).any()):
        raise ValueError(
            f"the new tokens end at position {int(newest.min())}, but the cache has seen position {int(stored.max())}: "
            "pass only what follows (or the whole text to generate()), or call cache.reset() before another text"
        )


def observed(layer: CompressedLayer) -> None:
    """Raises ValueError if the attention function never told the layer about its last tokens."""
    if layer.waiting:
        raise ValueError(
            f"layer {layer.layer_idx} stored {layer.waiting} tokens, but its attention function never saw them: the "
            "model no longer runs kvcomp's attention. Build the CompressedCache after the last "
            "set_attn_implementation()"
        )


def finite(layer: CompressedLayer) -> None:
    """Raises ValueError if rows that are new since the last compression, or recent queries, are NaN or infinite."""
    kv, fresh = layer.storage.recent, layer.count.fresh
    tensors = {"keys": kv.keys[:, :, kv.rows - fresh :], "values": kv.values[:, :, kv.rows - fresh :]}
    if layer.recent_queries.count:
        tensors["queries"] = layer.recent_queries.queries
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).any(-1).sum())
        if bad:
            raise ValueError(
                f"{bad} new {name} of layer {layer.layer_idx} are NaN or infinite, so scores would be NaN: the model "
                "overflows; try a dtype with more range, such as bfloat16 or float32"
            )


def crop(layer: CompressedLayer, tokens: int) -> None:
    """Raises ValueError if the newest `tokens` tokens cannot be removed without loss."""
    if tokens > layer.count.fresh:
        raise ValueError(
            f"cannot crop {tokens} tokens: only the {layer.count.fresh} newest were added since the last compression; "
            + RECORD
        )
    tokens_observed = tokens - layer.waiting
    scored = layer.uses_every_query and tokens_observed > layer.count.uncounted
    if scored or not layer.recent_queries.can_drop(tokens_observed):
        raise ValueError(f"cannot crop {tokens} tokens: their queries have been scored or forgotten; {RECORD}")


def stock_crop(layer: Any, tokens: int) -> None:
    """The same for a layer of transformers: a full sliding window has already dropped what the crop would need."""
    sliding = getattr(layer, "is_sliding", False) and not layer.record_past
    if tokens and sliding and layer.get_seq_length() >= layer.sliding_window:
        raise ValueError(
            f"cannot crop {tokens} tokens: a sliding layer keeps only {layer.sliding_window} tokens; {RECORD}"
        )
