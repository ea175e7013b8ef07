"""`a | b`: compressors in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcomp.core import KV, Compressor, Observed


class Composable:
    """Gives a compressor the operator `|`."""

    def __or__(self, other: Compressor) -> Pipeline:
        return Pipeline((*_stages(self), *_stages(other)))


@dataclass(frozen=True)
class Pipeline(Composable):
    """Runs `stages` one after the other; is itself a Compressor. Equal stages draw independent noise.

    Raises TypeError if a stage is no Compressor, ValueError if there is none.
    """

    stages: tuple[Compressor, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a Pipeline needs at least 1 stage, got 0")
        for stage in self.stages:
            if not isinstance(stage, Compressor):
                raise TypeError(f"{stage!r} is no Compressor: it lacks compress, budget, window or accumulates")

    @property
    def budget(self) -> int | None:
        """The smallest budget of a stage; None if no stage evicts."""
        return min((stage.budget for stage in self.stages if stage.budget is not None), default=None)

    @property
    def window(self) -> int:
        """The largest window of a stage."""
        return max(stage.window for stage in self.stages)

    @property
    def accumulates(self) -> bool:
        """Whether some stage wants `KV.mass`."""
        return any(stage.accumulates for stage in self.stages)

    def check_prompt(self, tokens: int) -> None:
        """Raises the ValueError of the first stage that cannot hold a prompt of `tokens` tokens."""
        for stage in self.stages:
            stage.check_prompt(tokens)

    def compress(self, kv: KV, seen: Observed) -> KV:
        """The rows after the last stage."""
        for index, stage in enumerate(self.stages):
            kv = stage.compress(kv, replace(seen, seed=seen.seed + index * 0x9E3779B97F4A7C15))
        return kv


def _stages(compressor: object) -> tuple[Compressor, ...]:
    if isinstance(compressor, Pipeline):
        return compressor.stages
    if isinstance(compressor, Compressor):
        return (compressor,)
    raise TypeError(f"{compressor!r} is no Compressor, so it cannot be joined with |")
