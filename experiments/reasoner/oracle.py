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
        return positions.float() + self.until.shape[1] * (until > positions[:, :, -1:]).float()


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
    rules_end = next(index for index in range(2, begin) if words[index + 1].isdigit())
    until[2:rules_end] = [FOREVER] * (rules_end - 2)
    last = {words[index]: index for index in range(rules_end, begin - 2, 2)}
    for step in _counters(words):  # register old #step register new
        register = words[step - 2]
        _need(until, last[register], 2, step - 1)
        last[register] = step + 1


def _derivations(words: list[str], begin: int, until: list[int]) -> None:
    """Links always; a definition until it is used; a name and its value where they were derived, until they are last
    read, and where they were restated, until the next time: a model may read either."""
    first_link = next(index for index in range(2, begin) if words[index][1:] == "0")
    given = words.index("given")
    until[first_link:given] = [FOREVER] * (given - first_link)
    definitions = {words[index]: index for index in range(2, first_link, 3)}
    derived = {words[given + 1]: given + 1}
    step = begin
    while words[step] in definitions:  # name> name constant name value
        _need(until, definitions[words[step]], 3, step + 2)
        derived[words[step + 3]] = step + 3
        step += 5
    last = dict(derived)
    for step in _counters(words):  # name value #step
        name = words[step - 2]
        for row in (derived[name], last[name]):
            _need(until, row, 2, step - 1)
        last[name] = step - 2


def _counters(words: list[str]) -> list[int]:
    return [index for index, word in enumerate(words) if word.startswith("#")]


def _need(until: list[int], start: int, count: int, position: int) -> None:
    until[start : start + count] = [position] * count


def until(chains: Sequence[Chain], family: str) -> Tensor:
    """`needed_until` of several chains `[batch, tokens]`."""
    rows = [needed_until(chain, family) for chain in chains]
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
