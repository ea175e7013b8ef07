"""What a cache holds at a given length, from shapes alone: real layers that are fed tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcomp.core import KV, Compressor
from kvcomp.layer import CompressedLayer
from kvcomp.memory import ROW_PARTS, Memory, held_tensors, nbytes, row_parts
from kvcomp.plan.shapes import ShapesOnly, extra_bytes, remember, sized

RECORDER = "kvcomp_plan"
"""Name under which the attention function of `one_token` is registered."""


@dataclass(frozen=True)
class Token:
    """Query, key and value of one token in one layer, each `[batch, heads, 1, width]`."""

    query: Tensor
    key: Tensor
    value: Tensor

    def times(self, count: int) -> Token:
        """As many tokens."""
        return Token(*(sized(tensor, count) for tensor in (self.query, self.key, self.value)))

    @property
    def shape(self) -> tuple[Any, ...]:
        """What makes two layers hold the same."""
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in (self.query, self.key, self.value))


@dataclass(frozen=True)
class DryRun:
    """A cache fed a prompt in one forward and then single tokens.

    `memory`: at the end; `after_prompt`: once every layer has taken the prompt; `whole`: what the prompt takes in a
    layer that holds all of its rows for a moment, until it compresses them (0 if it does not); `extra`: what packed
    rows may take beyond those counted, see `extra_rows`.
    """

    memory: Memory
    after_prompt: Memory
    whole: int
    extra: int = 0

    @property
    def peak(self) -> int:
        """The most bytes held: at the end, or when the last layer has just compressed the prompt."""
        return max(self.memory.total, self.after_prompt.total + self.whole) + self.extra


class Layers:
    """The layers of a model on the meta device, at two moments of a text: after its `prompt`, and at its `length`.

    `tokens`: one token in each layer that a compressor works on.
    """

    def __init__(self, model: PreTrainedModel, batch: int, prompt: int, length: int):
        self.prompt, self.length = prompt, length
        layers, tokens = one_token(model, batch)
        compressible = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not tokens.keys() >= set(compressible):
            raise ValueError(f"{model.config.model_type} cannot be planned: it does not tell which layer attends")
        self.tokens = {index: tokens[index] for index in compressible}
        stock = {index: _stock_bytes(layer, tokens.get(index), prompt, length) for index, layer in enumerate(layers)}
        self.others = [sum(held[end] for index, held in stock.items() if index not in self.tokens) for end in (0, 1)]

    def full(self) -> DryRun:
        """A cache that keeps every token."""
        parts = []
        for seen in (self.prompt, self.length):
            keys, values = (
                sum(getattr(token, side).nbytes for token in self.tokens.values()) * seen for side in ("key", "value")
            )
            parts.append({"keys": keys, "values": values})
        return self._run(parts, [self.prompt, self.length], 0)

    def compressed(self, compressor: Compressor, interval: int) -> DryRun:
        """A `CompressedCache`. Raises ValueError for a compressor that packs rows and is no `Quantizer`."""
        known: dict[tuple[Any, ...], tuple[list[dict[str, int]], list[int], int]] = {}
        for token in self.tokens.values():
            if token.shape not in known:
                known[token.shape] = _layer_run(compressor, interval, token, self.prompt, self.length)
        runs = [known[token.shape] for token in self.tokens.values()]
        parts = [{name: sum(held[end][name] for held, _, _ in runs) for name in runs[0][0][end]} for end in range(2)]
        rows = [max(rows[end] for _, rows, _ in runs) for end in range(2)]
        extra = sum(extra_bytes(compressor, _row(token, compressor)) for token in self.tokens.values())
        return self._run(parts, rows, max(whole for _, _, whole in runs), extra)

    def _run(self, parts: list[dict[str, int]], rows: list[int], whole: int, extra: int = 0) -> DryRun:
        token = sum(token.key.nbytes + token.value.nbytes for token in self.tokens.values())
        elements = sum(token.key.numel() + token.value.numel() for token in self.tokens.values())
        nothing = dict.fromkeys((*ROW_PARTS, "mass", "queries"), 0)
        after_prompt, memory = (
            Memory(
                **nothing | held, other_layers=other, full=token * seen + other, rows=kept, seen=seen,
                elements=elements * kept,
            )
            for held, other, seen, kept in zip(parts, self.others, (self.prompt, self.length), rows, strict=True)
        )  # fmt: skip
        return DryRun(memory, after_prompt, whole, extra)


def _row(token: Token, compressor: Compressor) -> KV:
    kv = KV.of(token.key, token.value)
    return replace(kv, mass=kv.keys.new_empty(kv.keys.shape[:3], dtype=torch.float32)) if compressor.accumulates else kv


def one_token(model: PreTrainedModel, batch: int) -> tuple[list[Any], dict[int, Token]]:
    """The layers of a full cache after one token, and by layer the token that its attention was given.

    The model is left with an attention that computes nothing. Raises ValueError for one that cannot run on shapes.
    """
    tokens: dict[int, Token] = {}
    causal: set[bool] = set()

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        tokens[module.layer_idx] = Token(query, key, value)
        causal.add(getattr(module, "is_causal", True))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(RECORDER, record)
    model.set_attn_implementation(RECORDER)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the usual one asks which experts the router has chosen
    cache = DynamicCache(config=model.config)
    try:
        with torch.no_grad():
            model(torch.zeros(batch, 1, dtype=torch.int64, device="meta"), cache=cache, use_cache=True)
    except (RuntimeError, AttributeError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(
            f"{model.config.model_type} cannot be planned: its forward needs more than shapes ({error}); load the "
            "model and measure with CompressedCache.memory()"
        ) from error
    if causal == {False}:
        raise ValueError(f"{model.config.model_type} cannot be planned: it is an encoder, so it has no use for a cache")
    return cache.layers, tokens


def _stock_bytes(layer: Any, token: Token | None, prompt: int, length: int) -> tuple[int, int]:
    """Bytes that a layer of transformers holds after the prompt and at the end; it holds one token already.

    It makes room for the rows of a forward anew each time, so that all but the last step may be fed at once.
    """
    held = []
    for steps in ((prompt - 1,), (length - prompt - 1, min(length - prompt, 1))):
        for new in steps:
            if new > 0 and token is not None and isinstance(layer, DynamicLayer):
                rows = token.times(new)
                layer.update(rows.key, rows.value)
        held.append(nbytes(held_tensors(vars(layer))))
    return held[0], held[1]


class _Layer(CompressedLayer):
    def _accumulate(self) -> None:
        queries = self.observed(self.count.uncounted).queries
        if queries is not None and self.compressor.remembers:
            remember(self.remembered, queries, self.storage.recent.keys.shape[1])
        self.count.uncounted = 0  # the numbers in `mass` change, not their place


def _layer_run(
    compressor: Compressor, interval: int, token: Token, prompt: int, length: int
) -> tuple[list[dict[str, int]], list[int], int]:
    """Bytes by part and rows of a layer after the prompt and at the end; what the prompt takes before it is
    compressed."""
    layer = _Layer(ShapesOnly(compressor), 0, interval, 0, None)
    _feed(layer, token, prompt)
    whole = sum(layer_parts(layer)[name] for name in (*ROW_PARTS, "mass")) if layer.due() else 0
    layer.settle()
    parts, rows = [layer_parts(layer)], [layer.storage.rows]
    known: dict[tuple[Any, ...], int] = {}
    while layer.count.seen < length:
        _feed(layer, token, min(length - layer.count.seen, _room(layer)))
        layer.settle()
        # What comes after a compression depends on this state alone: whole rounds are left out.
        if layer.count.fresh == 0:
            state = (
                *layer_parts(layer).values(),
                layer.storage.rows,
                layer.recent_queries.count,
                layer.count.uncounted,
            )
            tokens = layer.count.seen - known.setdefault(state, layer.count.seen)
            layer.count.seen += (length - layer.count.seen) // tokens * tokens if tokens else 0
    return [*parts, layer_parts(layer)], [*rows, layer.storage.rows], whole


def _feed(layer: CompressedLayer, token: Token, new: int) -> None:
    tokens = token.times(new)
    layer.begin(None, masked=False, deferred=True)  # deferred: the layer does not look at numbers
    layer.update(tokens.key, tokens.value)
    layer.observe(tokens.query, None)


def _room(layer: CompressedLayer) -> int:
    """Tokens that may be fed at once and leave the layer as they would one by one: nothing grows or is compressed
    before the last of them."""
    storage, recent, compressor = layer.storage, layer.recent_queries, layer.compressor
    room = [storage.capacity - storage.buffered]
    if compressor.budget is not None:
        room.append(compressor.budget + layer.interval - storage.rows)
    if recent.buffer is not None:
        room.append(recent.buffer.shape[2] - recent.count)
    if layer.uses_every_query:
        room.append(layer.interval - layer.count.uncounted)
    return max(min(room), 1)


def layer_parts(layer: CompressedLayer) -> dict[str, int]:
    """Bytes of a layer by the parts of `Memory`."""
    return row_parts([layer.storage]) | {"queries": nbytes(layer.query_tensors)}
