"""`ScoreEvictor`: a method is a score; what every method shares (pads, sinks, recent rows, prompt, ties) is here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from kvcomp.core import KV, Kept, Observed, Score
from kvcomp.pipeline import Composable

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ScoreEvictor(Composable, ABC):
    """Keeps `budget` rows per batch row and KV head: the pinned ones, then the best scores, in time order.

    Padding leaves first. Pinned: the first `sinks` tokens, the `recent` newest ones, and with `protect_prompt` every
    token of the first prompt: what is fed before the first single-token forward. Exact ties go to the newer token. A
    subclass gives `score`, and says with `window` how many queries it wants.

    Raises ValueError for a budget that the pinned rows fill, sizes below zero, a prompt that does not fit, NaN scores.
    """

    budget: int
    _: KW_ONLY
    sinks: int = 4
    recent: int = 64
    protect_prompt: bool = False
    window: int = field(default=0, init=False, repr=False)
    accumulates: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.require(sinks=0, recent=0, window=0, budget=1)
        if self.budget <= self.reserved:
            raise ValueError(
                f"{type(self).__name__}: budget={self.budget} leaves no row to choose, as it is not above "
                f"{self._reserved_parts()}; raise budget to at least {self.reserved + 1} or lower these"
            )

    @property
    def reserved(self) -> int:
        """What the budget must exceed."""
        return self.sinks + self.recent

    @abstractmethod
    def score(self, kv: KV, seen: Observed) -> Score:
        """`[batch, kv_heads, rows]`, higher = keep. What it gives to pinned rows and padding does not matter."""

    def compress(self, kv: KV, seen: Observed) -> KV:
        """At most `budget` rows of `kv`."""
        return kv if kv.rows <= self.budget else kv.take(self.select(kv, seen))

    def select(self, kv: KV, seen: Observed) -> Kept:
        """Indices `[batch, kv_heads, budget]` of the rows to keep, ascending. Raises ValueError on NaN scores."""
        score = self.score(kv, seen.last(self.window)).float()
        bad = int((score.isnan() & ~kv.pads).sum())
        if bad:
            raise ValueError(
                f"{type(self).__name__}: {bad} of {score.numel()} scores of layer {seen.layer} are NaN; the "
                "model's own keys, values or queries are not finite (try a dtype with more range, such as bfloat16)"
            )
        score = score.clamp(-LARGEST, LARGEST).masked_fill(self.pinned(kv, seen), torch.inf)
        return best(score.masked_fill(kv.pads, -torch.inf), self.budget)

    def pinned(self, kv: KV, seen: Observed) -> Tensor:
        """Bool `[batch, kv_heads, rows]`: sinks, recent rows and, if asked, the prompt."""
        real = ~kv.pads
        pinned = real & (real.cumsum(-1) <= self.sinks)
        pinned[:, :, kv.rows - self.recent :] = True
        if self.protect_prompt and seen.prompt_end is not None:
            pinned |= kv.positions < seen.prompt_end[:, None, None]
            self._check_fits(int((pinned & real).sum(-1).max()), "prompt and recent rows")
        return pinned

    def check_prompt(self, tokens: int) -> None:
        """Raise ValueError if `protect_prompt` cannot hold a prompt of `tokens` tokens beside the recent rows."""
        if self.protect_prompt:
            self._check_fits(tokens + self.recent, f"prompt of {tokens} tokens and recent={self.recent}")

    def _check_fits(self, needed: int, what: str) -> None:
        if needed > self.budget:
            raise ValueError(
                f"{type(self).__name__}: protect_prompt=True must keep {needed} rows ({what}), but "
                f"budget={self.budget}; "
                f"raise budget to at least {needed}, shorten the prompt, or set protect_prompt=False"
            )

    def _reserved_parts(self) -> str:
        return f"sinks={self.sinks} + recent={self.recent}"


def best(score: Score, count: int) -> Kept:
    """Ascending indices of the `count` highest scores per head; among equal ones the newest (last) rows."""
    return ranked(score, count).sort(dim=-1).values


def ranked(score: Score, count: int) -> Kept:
    """The same indices, highest score first."""
    newest_first = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return score.shape[-1] - 1 - newest_first
