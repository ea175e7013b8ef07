"""The upper bound of every table: an evictor that knows which rows the rest of a chain needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from kvcomp.core import KV, Observed, Score
from kvcomp.eval.chains import Chain
from kvcomp.evict.base import ScoreEvictor

FOREVER = 1 << 30


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
        return positions.float() + FOREVER * (until > positions[:, :, -1:]).float()


def needed_until(chain: Chain, family: str) -> list[int]:
    """For each token of prompt and chain the last position whose token cannot be found without it; -1: none."""
    words, begin = chain.prompt + chain.chain, len(chain.prompt)
    until = [-1] * len(words)
    if family == "registers":
        _registers(words, begin, until)
    else:
        _derivations(words, begin, until)
    return until


def _registers(words: list[str], begin: int, until: list[int]) -> None:
    """Rules always; a register and its value until it is next read."""
    rules_end = max(index for index in range(begin) if words[index] == "odd") + 2
    until[2:rules_end] = [FOREVER] * (rules_end - 2)
    last: dict[str, int] = {words[index]: index for index in range(rules_end, begin - 2, 2)}
    for index in range(begin - 1, len(words) - 9, 9):  # state constant register old #left register new state parity
        register = words[index + 2]
        _need(until, last[register], 2, index + 3)
        last[register] = index + 5


def _derivations(words: list[str], begin: int, until: list[int]) -> None:
    """Links always; a definition until it is used; a name and its value until the value is next restated."""
    first_link = next(index for index in range(begin) if words[index] == "low") - 1
    given = words.index("given")
    until[first_link:given] = [FOREVER] * (given - first_link)
    definitions = {words[index]: index for index in range(2, first_link, 3)}
    last = {words[given + 1]: given + 1}
    index = begin - 1
    while words[index + 2].startswith("+"):  # name name constant name value
        _need(until, definitions[words[index]], 3, index + 2)
        last[words[index + 1]] = index + 3
        index += 5
    for step in range(index + 2, len(words) - 7, 7):  # name value #left total new name side
        _need(until, last[words[step]], 2, step + 1)
        last[words[step]] = step


def _need(until: list[int], start: int, count: int, position: int) -> None:
    until[start : start + count] = [position] * count


def until(chains: Sequence[Chain], family: str) -> Tensor:
    """`needed_until` of several chains `[batch, tokens]`."""
    rows = [needed_until(chain, family) for chain in chains]
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
