"""Evictors that are told the rest of a chain: which rows say it, or which rows the full cache reads for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from weights import attention_weights

from kvcomp.core import KV, Observed, Score
from kvcomp.eval.chains import CONSTANTS, FORMS, Chain
from kvcomp.evict.base import ScoreEvictor

KEYS = {*FORMS, *CONSTANTS}
"""Words that stand before what must be looked up."""
AT_ONCE = 10
"""Texts whose attention weights are held together."""


@dataclass(frozen=True, eq=False)
class Oracle(ScoreEvictor):
    """Keeps what is needed later, then the newest rows.

    `until` `[batch, tokens]`: the last position that needs the row of each token of the right chain (`needed_until`);
    every KV head gets the same. For batches whose rows stay together.
    """

    until: Tensor = field(repr=False)
    _: KW_ONLY
    recent: int = 32

    def score(self, kv: KV, seen: Observed) -> Score:
        """The position of a row, above all others where it is needed after the newest row."""
        positions = kv.positions.long()
        flat = positions.clamp(0, self.until.shape[1] - 1).flatten(1)
        until = self.until.gather(1, flat).view_as(positions)
        return positions.float() + self.until.shape[1] * (until > positions[:, :, -1:]).float()


@dataclass(frozen=True, eq=False)
class AttentionOracle(ScoreEvictor):
    """Keeps the rows that the full cache will read with the largest weight.

    `largest`, for each layer `[batch, kv_heads, tokens + 1, tokens]`: the largest weight that the tokens of the right
    chain from a place on give to each row (`largest_weights`). For batches whose rows stay together.
    """

    largest: Sequence[Tensor] = field(repr=False)
    _: KW_ONLY
    recent: int = 32

    def score(self, kv: KV, seen: Observed) -> Score:
        """The largest weight that is still to come."""
        from_now = self.largest[seen.layer][:, :, int(kv.positions[0, 0, -1]) + 1]
        return from_now.gather(2, kv.positions.long().clamp(0)).float()


def largest_weights(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """What `AttentionOracle` is told about the texts `ids` `[batch, tokens]`, in float16."""
    parts = [[_still_to_come(layer) for layer in attention_weights(model, some)] for some in ids.split(AT_ONCE)]
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def _still_to_come(weights: Tensor) -> Tensor:
    """From `[batch, kv_heads, group, queries, rows]` the maximum over the group's queries at or after each place."""
    latest_first = torch.nn.functional.pad(weights.amax(2).flip(2), (0, 0, 1, 0))
    return latest_first.cummax(2).values.flip(2).half()


def needed_until(chain: Chain) -> list[int]:
    """For each token of prompt and chain the last position whose next token is found with it; -1: none.

    A word is found behind the newest copy of its key, or behind the first one since when the same word stands there,
    for a model may read either; with the two words before that one, by which a derived value is known already.
    """
    words = chain.prompt + chain.chain
    until = [-1] * len(words)
    since: dict[tuple[str, bool, bool], int] = {}
    newest: dict[tuple[str, bool, bool], int] = {}
    for position, (word, following) in enumerate(itertools.pairwise(words)):
        if word not in KEYS:
            continue
        key = word, following.isdigit(), following[0] == "+"
        known = key in newest and words[newest[key] + 1] == following
        if known and position >= len(chain.prompt) - 1:
            for start, stop in ((since[key] - 2, since[key] + 2), (newest[key], newest[key] + 2)):
                until[start:stop] = [position] * (stop - start)
        if not known:
            since[key] = position
        newest[key] = position
    return until


def until(chains: Sequence[Chain]) -> Tensor:
    """`needed_until` of several chains of a family `[batch, tokens]`."""
    return torch.tensor([needed_until(chain) for chain in chains])
