"""The attention function that a compressed cache needs, and its installation on a model.

transformers does not hand queries to a cache. So the model is set to an attention function registered under a name of
its own; it runs the model's own attention and, where the keys come from a `CompressedLayer`, tells that layer about the
queries. Any other cache passes through untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from kvcomp.layer import CompressedLayer
from kvcomp.quant.mixed import MixedKV
from kvcomp.rotary import Rotary

NAMES = {"sdpa": "kvcomp_sdpa", "eager": "kvcomp_eager", "flash_attention_2": "kvcomp_fa2"}
"""Registered name by the model's own attention. None contains `flash`, which transformers takes for a kernel of the
hub."""

HIDDEN = -1e3
"""An additive mask below this hides a row; masks are made with values from -1e4 down to the least of the dtype."""
FEW = 8
"""Queries, such as drafts, up to which packed rows are read as codes; for more, a layer is decoded."""
ROTARY_FAMILIES = {
    "gemma", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3",
    "qwen3_moe",
}  # fmt: skip
"""Model types whose every full-attention layer is known, by test, to rotate as `Rotary` does."""


def install(model: PreTrainedModel) -> None:
    """Sets `model` to kvcomp's attention around the one it has. Does nothing if that is done already.

    Raises ValueError for an attention other than sdpa, eager and flash_attention_2, or a model that cannot be set.
    """
    current = model.config.get_text_config(decoder=True)._attn_implementation
    for own, name in NAMES.items():
        AttentionInterface.register(name, partial(attention_forward, own=own))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    if current in NAMES.values():
        return
    if current not in NAMES:
        raise ValueError(
            f"the model runs attention {current!r}, kvcomp supports {', '.join(NAMES)}: call "
            "model.set_attn_implementation('sdpa') before building the cache"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, so kvcomp "
            "cannot see its queries: use a model class of transformers itself (trust_remote_code=False)"
        )
    model.set_attn_implementation(NAMES[current])


def check_installed(decoder: nn.Module) -> None:
    """Raises ValueError if the model was set to another attention since `install`."""
    current = decoder.config._attn_implementation  # type: ignore[union-attr]
    if current not in NAMES.values():
        raise ValueError(
            f"the model now runs attention {current!r}, which tells the cache nothing: build the CompressedCache after "
            "the last call of set_attn_implementation()"
        )


def uninstall(model: PreTrainedModel) -> None:
    """Gives the model back the attention that it had before `install`."""
    for own, name in NAMES.items():
        if model.config.get_text_config(decoder=True)._attn_implementation == name:
            model.set_attn_implementation(own)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    own: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` `[batch, query_heads, new, head_dim]`; `[batch, new, query_heads, value_dim]` and weights or
    None.

    One query against the rows of a `CompressedLayer` under sdpa runs `folded_decode`; up to `FEW` against packed rows,
    unless the model runs eager attention, `MixedKV.attend`; all else the model's `own` attention, over decoded rows.
    """
    layer: CompressedLayer | None = getattr(key, "kvcomp_layer", None)
    if layer is None:
        return own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
    output: tuple[Tensor, Tensor | None]
    layer.hide(visible_rows(attention_mask))
    kv, scaling = layer.storage.kv, kwargs.get("scaling")
    plain = own != "eager" and _is_plain(kwargs)
    if isinstance(kv, MixedKV) and plain and query.shape[2] <= FEW and not layer.given_mask:
        output = kv.attend(query, scaling), None
    else:
        if isinstance(kv, MixedKV):
            key, value = kv.keys, kv.values
        if own == "sdpa" and plain and query.shape[2] == 1:
            output = folded_decode(query, key, value, attention_mask, scaling), None
        else:
            output = own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
    layer.observe(query, scaling)
    return output


def folded_decode(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of one query, `[batch, 1, query_heads, value_dim]`.

    The query heads that share a KV head become the rows of one product, so keys and values are read once and never
    repeated.
    """
    batch, query_heads = query.shape[:2]
    folded = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(batch, key.shape[1], -1, mask.shape[-1])
    output = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, 1, query_heads, value.shape[-1])


def visible_rows(mask: Tensor | None) -> Tensor | None:
    """Bool `[batch, rows]`: what the newest query sees; the rest is padding. None if there is no mask."""
    if mask is None:
        return None
    newest = mask[:, 0, -1] if mask.ndim == 4 else mask
    return newest if newest.dtype == torch.bool else newest > HIDDEN


def own_attention(module: nn.Module, own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that the model would run without kvcomp."""
    if own == "flash_attention_2":
        return _flash_attention_2
    source = sys.modules[type(module).__module__]
    if own == "eager":
        return source.eager_attention_forward
    return source.ALL_ATTENTION_FUNCTIONS[own]


def _flash_attention_2(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' own wrapper, which cannot be called: it looks the kernel up by the name the model is set to."""
    sinks = kwargs.get("s_aux")
    output = _flash_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attention_mask,
        query_length=query.shape[2], is_causal=True, dropout=kwargs.get("dropout", 0.0),
        softmax_scale=kwargs.get("scaling"), sliding_window=kwargs.get("sliding_window"), softcap=kwargs.get("softcap"),
        s_aux=None if sinks is None else sinks.to(query.dtype), attn_implementation="flash_attention_2",
    )  # fmt: skip
    return output, None


def _is_plain(kwargs: dict[str, Any]) -> bool:
    changed = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    return not (changed or kwargs.get("output_attentions") or kwargs.get("dropout"))


def rotary_of(model: PreTrainedModel, layer_type: str) -> Rotary | None:
    """The rotary embedding of the full-attention layers; None for a model that is not in `ROTARY_FAMILIES`, or whose
    angles depend on the length of the text.
    """
    decoder = model.get_decoder()
    embedding = getattr(decoder, "rotary_emb", None)
    if embedding is None or decoder.config.model_type not in ROTARY_FAMILIES:
        return None
    kind = getattr(embedding, "rope_type", None)
    if isinstance(kind, dict):  # one set of frequencies per layer type (Gemma3)
        kind, prefix = kind.get(layer_type), f"{layer_type}_"
    else:
        prefix = ""
    frequencies = getattr(embedding, f"{prefix}inv_freq", None)
    if frequencies is None or kind in ("dynamic", "longrope"):
        return None
    return Rotary(frequencies.detach().float(), float(getattr(embedding, f"{prefix}attention_scaling", 1.0)))
