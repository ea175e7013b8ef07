"""Reports on a model: the keys, values and queries of a text, and what the model predicts through each cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvcomp import attention
from kvcomp.cache import CompressedCache
from kvcomp.core import KV, Compressor, Observed
from kvcomp.quant.spec import Full
from kvcomp.report.build import Measurements, Progress, assemble, measure_layers
from kvcomp.report.figures import ModelFigures, Report
from kvcomp.report.inputs import DEFAULT, Compressors, check_sinks, named
from kvcomp.report.provenance import provenance

READ = 512
"""Tokens of one forward while rows are captured."""


def quantization_report(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    compressors: Compressors = DEFAULT,
    *,
    window: int = 64,
    chunk: int = 64,
    interval: int = 64,
    seed: int = 0,
    sinks: int = 4,
    compare: bool = True,
    predict: bool = True,
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Report:
    """What each compressor does to the cache of `model` on a text.

    `inputs`: token ids `[batch, tokens]` without padding, or a mapping with `input_ids`. The text is read once with
    every row kept; then keys and values (after RoPE) of each full-attention layer are compressed whole, one layer at a
    time, and judged with the queries of the last `window` tokens: see `report_tensors` for these figures and for
    `compressors`, `sinks` and `compare`. With `predict` it is then read again through a `CompressedCache` for each
    compressor (`interval`, `seed`) beside a full one, `chunk` tokens a forward, and the second half is scored:
    `ModelFigures`. All these caches are held at once. `settings` is added to the report's own.

    The attention output leaves out learned sinks and caps of logits. Raises ValueError for padding, a text too short to
    be packed, sizes below 1, a model in training mode, and what `report_tensors` and `CompressedCache` refuse.
    """
    ids = _ids(inputs, model)
    _check(model, sinks, window=window, chunk=chunk)
    shown = named(compressors)
    wanted = min(ids.shape[1], max(window, *(compressor.window for compressor in shown.values())))
    with torch.no_grad(), _attention_as_before(model):
        captured, left_out = capture(model, ids, wanted, seed)
        todo = Measurements.of(shown, _layer(captured[0], window)[0], compare)
        layers = (_layer(layer, wanted) for layer in captured)
        measured = measure_layers(layers, len(captured), todo, sinks, progress, window)
        del captured
        found = predictions(model, ids, todo.shown, chunk, interval, seed, progress) if predict else {}
    sizes = {"window": min(window, ids.shape[1]), "chunk": chunk, "interval": interval, "seed": seed, "sinks": sinks}
    return assemble(todo, measured, _told(model, ids) | sizes | dict(settings or {}), left_out, found)


def _check(model: PreTrainedModel, sinks: int, **sizes: int) -> None:
    check_sinks(sinks)
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")


def _told(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """What the report says of the model and the text."""
    return {
        **provenance(), "source": getattr(model.config, "_name_or_path", "") or model.config.model_type,
        "tokens_sha256": hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest(), "shape": list(ids.shape),
        "dtype": str(model.dtype).removeprefix("torch."),
    }  # fmt: skip


def _not_counted(model: PreTrainedModel) -> list[str]:
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if not capped and not any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return []
    return ["The attention output is that without the model's learned sinks or cap of logits."]


def capture(model: PreTrainedModel, ids: Tensor, window: int, seed: int) -> tuple[list[Any], list[str]]:
    """The layers of a cache that has read `ids` and kept every row and the last `window` queries; and what is
    left out: layers that have none, parts of attention."""
    cache = CompressedCache(model, Full(window=window), seed=seed)
    for start in range(0, ids.shape[1], READ):
        model(ids[:, start : start + READ], cache=cache, logits_to_keep=1)
    other = [index for index, layer in enumerate(cache.layers) if layer not in cache.compressed]
    listed = f"Layers {', '.join(map(str, other))} are left out: they keep a sliding window or a state, which no "
    return cache.compressed, [*([f"{listed}compressor touches."] if other else []), *_not_counted(model)]


def _layer(layer: Any, window: int) -> tuple[KV, Observed]:
    """Rows and queries of a captured layer. Raises ValueError if they are NaN or infinite."""
    kv, seen = KV(layer.keys, layer.values, layer.positions), layer.observed(window)
    for name, tensor in (("keys", kv.keys), ("values", kv.values), ("queries", seen.queries)):
        bad = int((~tensor.isfinite()).any(-1).sum())
        if bad:
            raise ValueError(
                f"{bad} {name} of layer {layer.layer_idx} are NaN or infinite: the model overflows; try a dtype with "
                "more range, such as bfloat16"
            )
    seen = replace(seen, phase="decode", prompt_end=None)
    if kv.keys.device.type == "mps":  # which has no float64
        return kv.map(Tensor.cpu), replace(seen, queries=seen.queries.cpu(), query_positions=seen.query_positions.cpu())
    return kv, seen


@dataclass
class _Score:
    """Sums over the tokens that a cache has predicted."""

    cache: CompressedCache
    divergence: float = 0.0
    agreed: int = 0
    loss: float = 0.0

    def add(self, logits: Tensor, full: Tensor, targets: Tensor) -> None:
        """`logits`, `full` `[tokens, vocabulary]`: through this cache and the full one; `targets` `[tokens]`."""
        own, reference = logits.float().log_softmax(-1), full.float().log_softmax(-1)
        self.divergence += float((reference.exp() * (reference - own)).sum(-1).double().sum())
        self.agreed += int((logits.argmax(-1) == full.argmax(-1)).sum())
        self.loss += _loss(logits, targets)

    def figures(self, count: int, full_loss: float, name: str) -> ModelFigures:
        """Means over `count` tokens. Raises ValueError if they are not finite."""
        if not all(map(math.isfinite, (self.divergence, self.loss, full_loss))):
            raise ValueError(f"the predictions through {name!r} are not finite: the model overflows")
        own, full = (math.exp(min(loss / count, 700.0)) for loss in (self.loss, full_loss))  # above is no float
        held = self.cache.memory().total
        return ModelFigures(self.divergence / count, self.agreed / count, own, full, count, held)


def predictions(
    model: PreTrainedModel,
    ids: Tensor,
    compressors: Mapping[str, Compressor],
    chunk: int,
    interval: int,
    seed: int,
    progress: Progress | None,
) -> dict[str, ModelFigures]:
    """`ModelFigures` by name. Tokens `tokens // 2` to the last one are predicted, each from all before it."""
    batch, length = ids.shape
    half, loss = max(length // 2, 1), 0.0
    full = DynamicCache(config=model.config)
    scores = {name: _Score(CompressedCache(model, each, interval, seed)) for name, each in compressors.items()}
    chunks = range(0, length, chunk)
    for step, start in enumerate(chunks):
        stop = min(start + chunk, length)
        first = max(start, half - 1)  # the logits of position p predict token p + 1
        targets = ids[:, first + 1 : stop + 1].flatten()
        forward = _forward(model, ids[:, start:stop], max(stop - first, 1), targets.numel() // batch)
        reference = forward(full)
        loss += _loss(reference, targets)
        for index, score in enumerate(scores.values()):
            score.add(forward(score.cache), reference, targets)
            if progress is not None:
                progress("reading", step * len(scores) + index + 1, len(chunks) * len(scores))
    return {name: score.figures(batch * (length - half), loss, name) for name, score in scores.items()}


def _forward(model: PreTrainedModel, ids: Tensor, keep: int, targets: int) -> Callable[[Any], Tensor]:
    """A forward of `ids` through a cache: the logits `[batch * targets, vocabulary]` of the positions that have a
    target, which are the first of the last `keep`."""

    def run(cache: Any) -> Tensor:
        return model(ids, cache=cache, logits_to_keep=keep).logits[:, :targets].flatten(0, 1)

    return run


def _loss(logits: Tensor, targets: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")) if len(targets) else 0.0


def _ids(inputs: Tensor | Mapping[str, Any], model: PreTrainedModel) -> Tensor:
    ids = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
    mask = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        shape = list(ids.shape) if isinstance(ids, Tensor) else ids
        raise ValueError(f"inputs must be token ids [batch, tokens] of at least 2 tokens, got {shape}")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise ValueError("the inputs are padded; give texts of one length, or one text at a time")
    return ids.to(model.device)


@contextmanager
def _attention_as_before(model: PreTrainedModel) -> Iterator[None]:
    """Takes kvcomp's attention off the model afterwards if it was not set before."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    try:
        yield
    finally:
        if before not in attention.NAMES.values():
            attention.uninstall(model)
