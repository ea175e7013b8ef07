"""`CompressedCache`: a transformers cache whose full-attention layers are compressed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, get_layer_types_and_kwargs

from kvcomp import attention, checks, save
from kvcomp.core import Compressor
from kvcomp.layer import CompressedLayer
from kvcomp.memory import Memory


class CompressedCache(Cache):  # type: ignore[misc]
    """Pass it to `model.generate(..., cache=cache)` or `model(..., cache=cache)`.

    `compressor` runs on each full-attention layer after a prompt longer than its budget and then whenever `interval`
    new tokens have gathered, so a layer stores at most `budget + interval` rows. Sliding-window and linear layers keep
    transformers' own cache layers. Positions go on counting every token, as the model expects. `seed` fixes all noise.

    The model is set to kvcomp's attention function (`kvcomp.attention.install`); other caches on it work as before.
    One cache serves one text (or batch): call `reset()` before another.

    Raises TypeError if `compressor` is no Compressor; ValueError for an interval below 1, a model without
    full-attention layers or one whose attention cannot be set; NotImplementedError for encoder-decoder models, latent
    attention (MLA) and layers that share keys.
    """

    def __init__(self, model: PreTrainedModel, compressor: Compressor, interval: int = 64, seed: int = 0):
        if not isinstance(compressor, Compressor):
            raise TypeError(f"{compressor!r} is no Compressor: pass for example kvcomp.evict.VaSE(budget=1024)")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be an int of at least 1, got {interval!r}")
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
                f"{sorted(set(layer_types))}); "
                "its cache is bounded already, use transformers' DynamicCache"
            )
        attention.install(model)
        _guard(model)
        super().__init__(layers=layers)
        self.compressor, self.interval, self.seed = compressor, interval, seed
        self.model_shape = save.model_shape(config)
        self.unfinished: int | None = None  # tokens seen when a forward began that has not ended

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that are compressed, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def memory(self) -> Memory:
        """Bytes that the cache holds now, by part, beside what a full cache would hold."""
        return Memory.of(self)

    def reset(self) -> None:
        """Forgets the text; the cache may then serve another one."""
        super().reset()
        self.unfinished = None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens from every layer, or raises ValueError and removes none."""
        for layer in self.layers:
            _check_crop(layer, max(-tokens_to_remove, 0))
        for layer in self.compressed:
            layer.deferred = True
        super().crop(tokens_to_remove)
        self._settle()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to one safetensors file: rows, true positions, counters, compressor settings."""
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
        save.restore(cache, header, tensors, [next(layer.parameters()).device for layer in model.get_decoder().layers])
        return cache

    # Around a forward -------------------------------------------------------------------------------------------------

    def begin_call(self, inputs: Mapping[str, Any]) -> None:
        """Refuses a wrong call, undoes one that was interrupted; called before every forward of the model."""
        self._roll_back()
        checks.call(self, inputs)
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if tokens is None:
            return
        self.unfinished = self.compressed[0].count.seen
        for layer in self.compressed:  # the rows of a long text are let go of layer by layer, few rows can wait
            layer.deferred = self.unfinished > 0 and tokens.shape[1] <= self.interval

    def end_call(self) -> None:
        """Compresses what is due in every layer; called after every forward of the model that has run to its end."""
        self._settle()
        self.unfinished = None

    def _settle(self) -> None:
        waiting = [layer for layer in self.compressed if layer.deferred]
        for layer in waiting:
            layer.due()  # raises, if it must, before any layer has changed
        for layer in waiting:
            layer.settle()
            layer.deferred = False

    def _roll_back(self) -> None:
        """Removes what a forward that stopped half-way left in the layers it had reached."""
        if self.unfinished == 0:
            self.reset()
        if self.unfinished is None:
            return
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer | DynamicLayer)]
        ahead = [(layer, layer.get_seq_length() - self.unfinished) for layer in layers]
        try:
            for layer, tokens in ahead:
                _check_crop(layer, tokens)
        except ValueError as error:
            raise ValueError(
                f"an earlier forward stopped half-way and cannot be undone ({error}): call cache.reset(), or load a "
                "saved cache"
            ) from error
        for layer, tokens in ahead:
            layer.remove(tokens) if isinstance(layer, CompressedLayer) else layer.crop(-tokens)
        self.unfinished = None


def _check_crop(layer: Any, tokens: int) -> None:
    checks.crop(layer, tokens) if isinstance(layer, CompressedLayer) else checks.stock_crop(layer, tokens)


def _guard(model: PreTrainedModel) -> None:
    """Tells a `CompressedCache` when a forward of the model begins, with its arguments, and when it has ended."""
    decoder = model.get_decoder()
    if not any(hook is _before_forward for hook in decoder._forward_pre_hooks.values()):
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
        decoder.register_forward_hook(_after_forward, with_kwargs=True)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if isinstance(cache, CompressedCache):
        attention.check_installed(module)
        cache.begin_call({**kwargs, **({"input_ids": args[0]} if args else {})})


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if isinstance(cache, CompressedCache):
        cache.end_call()
