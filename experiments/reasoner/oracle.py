"""An evictor that is told by which rows the rest of a chain can be found: what a good choice would reach at least."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from kvcomp.core import KV, Observed, Score
from kvcomp.eval.chains import CONSTANTS, FORMS, Chain
from kvcomp.evict.base import ScoreEvictor

KEYS = {*FORMS, *CONSTANTS}
"""Words that stand before what must be looked up."""


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
