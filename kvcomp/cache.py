"""`CompressedCache`: a transformers cache whose full-attention layers are compressed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, get_layer_types_and_kwargs

from kvcomp import attention, checks, save
from kvcomp.core import Compressor
from kvcomp.layer import ABANDONED, CompressedLayer
from kvcomp.memory import Memory


class CompressedCache(Cache):  # type: ignore[misc]
    """Pass it to `model.generate(..., cache=cache)` or `model(..., cache=cache)`.

    `compressor` runs on each full-attention layer after a prompt longer than its budget and then whenever `interval`
    new tokens have gathered, so a layer stores at most `budget + interval` rows. Sliding-window and linear layers keep
    transformers' own cache layers. Positions go on counting every token, as the model expects. `seed` fixes all noise.

    The model is set to kvcomp's attention function (`kvcomp.attention.install`); other caches on it work as before. One
    cache serves one text (or batch): call `reset()` before another. While drafts are rolled back (assisted decoding,
    prompt lookup) nothing is compressed before they are accepted, so a long prompt is held whole until the first
    `crop`.

    Raises TypeError if `compressor` is no Compressor; ValueError for an interval below 1, a model without
    full-attention layers or one whose attention cannot be set; NotImplementedError for encoder-decoder models, latent
    attention (MLA) and layers that share keys.
    """

    def __init__(self, model: PreTrainedModel, compressor: Compressor, interval: int = 64, seed: int = 0):
        if not isinstance(compressor, Compressor):
            raise TypeError(f"{compressor!r} is no Compressor: pass for example kvcomp.evict.VaSE(budget=1024)")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be an int of at least 1, got {interval!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an int, got {seed!r}")
        config = model.config.get_text_config(decoder=True)
        checks.model_is_supported(model.config, config)
        layer_types, _ = get_layer_types_and_kwargs(config)
        layers = DynamicCache(config=config).layers
        for index, layer_type in enumerate(layer_types):
            if type(layers[index]) is DynamicLayer:
                rotary = attention.rotary_of(model, layer_type)
                layers[index] = CompressedLayer(compressor, index, interval, seed, rotary)
        if not any(isinstance(layer, CompressedLayer) for layer in layers):
            raise ValueError(
                f"{config.model_type} has no full-attention layer to compress (its layers: "
                f"{sorted(set(layer_types))}); use transformers' DynamicCache"
            )
        for _, head_dim in checks.kv_shapes(config):
            compressor.check_head_dim(head_dim)
        attention.install(model)
        _guard(model)
        super().__init__(layers=layers)
        self.compressor, self.interval, self.seed = compressor, interval, seed
        self.model_shape = save.model_shape(config, model.dtype)
        self.unfinished: int | None = None  # tokens seen when a forward began that has not ended

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that are compressed, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen by every layer; those of a forward that has not ended do not count."""
        return super().get_seq_length(layer_idx) if self.unfinished is None else self.unfinished

    def memory(self) -> Memory:
        """Bytes that the cache holds now, by part, beside what a full cache would hold."""
        return Memory.of(self)

    def reset(self) -> None:
        """Forgets the text; the cache may then serve another one."""
        super().reset()
        self.unfinished = None
        self._stop_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens from every layer, or raises ValueError and removes none."""
        self._roll_back()
        layers = [layer for layer in self.layers if not _is_empty(layer)]
        for layer in layers:
            _check_crop(layer, max(-tokens_to_remove, 0))
        for layer in self.compressed:
            layer.deferred = True
        for layer in layers:
            layer.crop(tokens_to_remove)
        self._settle()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row `i` becomes row `beam_idx[i]` in every layer."""
        self._roll_back()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row becomes `repeats` rows."""
        self._roll_back()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these batch rows (indices or a bool mask)."""
        self._roll_back()
        super().batch_select_indices(torch.as_tensor(indices))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to one safetensors file: rows, true positions, counters, compressor settings."""
        self._roll_back()
        save.write(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: PreTrainedModel, compressor: Compressor | None = None
    ) -> CompressedCache:
        """The cache that `save` wrote, for the same model. `compressor` is needed only if it is not one of kvcomp's.

        Raises ValueError for a file of another format or another model.
        """
        header, tensors = save.read(path)
        settings = header["compressor"]
        compressor = save.from_settings(settings) if compressor is None else compressor
        if save.to_settings(compressor) != settings:
            raise ValueError(f"{path} was written with {settings}, got {compressor!r}; pass the same settings")
        cache = cls(model, compressor, header["interval"], header["seed"])
        save.restore(cache, header, tensors, _devices(model, len(cache.layers)))
        return cache

    # Around a forward -------------------------------------------------------------------------------------------------

    def begin_call(self, inputs: Mapping[str, Any]) -> None:
        """Refuses a wrong call, undoes one that was interrupted; called before every forward of the model."""
        self._roll_back()
        checks.call(self, inputs)
        tokens = checks.tokens_of(inputs)
        if tokens is None:
            return
        self.unfinished = self.compressed[0].count.seen
        positions, mask = checks.text_positions(inputs.get("position_ids")), inputs.get("attention_mask")
        masked = mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)
        for layer in self.compressed:  # the rows of a long text are let go of layer by layer, few rows can wait
            layer.begin(positions, masked, deferred=self.unfinished > 0 and tokens.shape[1] <= self.interval)

    def end_call(self) -> None:
        """Compresses what is due in every layer; called after every forward of the model that has run to its end."""
        if self.compressed[0].record_past and self.compressed[0].count.uncropped > ABANDONED:
            self._stop_recording()
        for layer in self.compressed:
            checks.observed(layer)
        self._settle()
        for layer in self.compressed:
            layer.given_positions = None  # as long as the text that was fed
        self.unfinished = None

    def _stop_recording(self) -> None:
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                if getattr(layer, "is_sliding", False) and not _is_empty(layer):
                    layer.crop(0)  # back to the window
                layer.record_past = False

    def _settle(self) -> None:
        waiting = [layer for layer in self.compressed if layer.deferred]
        for layer in waiting:  # raises, if it must, before any layer has changed
            if layer.due():
                checks.finite(layer)
        for layer in waiting:
            layer.settle()
            layer.deferred = False

    def _roll_back(self) -> None:
        """Removes what a forward that stopped half-way left in the layers it had reached."""
        if self.unfinished == 0:
            recording = self.compressed[0].record_past
            self.reset()
            if recording:
                self.activate_past_recording()
        if self.unfinished is None:
            return
        try:
            ahead = [(layer, checks.length(layer) - self.unfinished) for layer in self.layers if not _is_empty(layer)]
            for layer, tokens in ahead:
                _check_crop(layer, tokens)
        except ValueError as error:
            raise ValueError(
                f"an earlier forward stopped half-way and cannot be undone ({error}): call cache.reset(), or load a "
                "saved cache"
            ) from error
        for layer, tokens in ahead:
            layer.undo(tokens) if isinstance(layer, CompressedLayer) else layer.crop(-tokens)
        self.unfinished = None


def _is_empty(layer: Any) -> bool:
    return isinstance(layer, DummyLayer) or not getattr(layer, "is_initialized", True)


def _devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Where the parameters of each decoder layer are."""
    modules = getattr(model.get_decoder(), "layers", None)
    return [model.device] * layers if modules is None else [next(module.parameters()).device for module in modules]


def _check_crop(layer: Any, tokens: int) -> None:
    checks.crop(layer, tokens) if isinstance(layer, CompressedLayer) else checks.stock_crop(layer, tokens)


def _guard(model: PreTrainedModel) -> None:
    """Tells a `CompressedCache` when a forward of the model begins, with its arguments, and when it has ended."""
    decoder = model.get_decoder()
    if not any(hook is _before_forward for hook in decoder._forward_pre_hooks.values()):
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
        decoder.register_forward_hook(_after_forward, with_kwargs=True)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache, kwargs = _cache_of(module, args, kwargs)
    if isinstance(cache, CompressedCache):
        attention.check_installed(module)
        checks.not_training(module)
        cache.begin_call(kwargs)


def _cache_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The cache of a call and all its arguments by name."""
    if args:
        kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    return kwargs.get("cache", kwargs.get("past_key_values")), kwargs


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache, _ = _cache_of(module, args, kwargs)
    if isinstance(cache, CompressedCache):
        cache.end_call()
