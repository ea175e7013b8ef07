"""`a | b`: compressors in order."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvcomp.core import KV, Compressor, Observed


class Composable:
    """Gives a compressor the operator `|`, and the answers of one that packs and remembers nothing and holds any prompt
    and row."""

    unpacked: int | None = None
    remembers: int = 0

    def __or__(self, other: Compressor) -> Pipeline:
        return Pipeline((*stages_of(self), *stages_of(other)))

    def check_prompt(self, tokens: int) -> None:
        """Any prompt is held."""

    def check_head_dim(self, head_dim: int) -> None:
        """Rows of any width are compressed."""

    def require(self, **least: int) -> None:
        """Raise ValueError if a flag is no bool, a number is no number, or an integer field is below its least
        value."""
        for setting in fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, setting.name), type(setting.default)
            wrong = kind is bool and not isinstance(value, bool)
            optional = value is None and "None" in str(setting.type)
            wrong |= kind is float and not optional and (isinstance(value, bool) or not isinstance(value, int | float))
            if wrong:
                raise ValueError(f"{type(self).__name__}: {setting.name} must be a {kind.__name__}, got {value!r}")
        for name, minimum in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{type(self).__name__}: {name} must be an int, got {value!r}")
            if value < minimum:
                raise ValueError(f"{type(self).__name__}: {name} must be at least {minimum}, got {value}")


@dataclass(frozen=True)
class Pipeline(Composable):
    """Runs `stages` one after the other; is itself a Compressor. Equal stages draw independent noise.

    Raises TypeError if a stage is no Compressor, ValueError if there is none or more than one packs rows.
    """

    stages: tuple[Compressor, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a Pipeline needs at least 1 stage, got 0")
        for stage in self.stages:
            if not isinstance(stage, Compressor):
                raise TypeError(f"{stage!r} is no Compressor: it lacks a method or property of kvcomp.Compressor")
        packing = [stage for stage in self.stages if stage.unpacked is not None]
        if len(packing) > 1:
            raise ValueError(
                f"a Pipeline can pack rows once, but {len(packing)} stages do ({packing}): leave one of them out"
            )

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

    @property
    def remembers(self) -> int:  # type: ignore[override]
        """The most older queries that a stage wants."""
        return max(stage.remembers for stage in self.stages)

    @property
    def unpacked(self) -> int | None:  # type: ignore[override]
        """Newest rows that the stage which packs leaves in the model dtype; None if there is none."""
        return next((stage.unpacked for stage in self.stages if stage.unpacked is not None), None)

    def check_prompt(self, tokens: int) -> None:
        """Raises the ValueError of the first stage that cannot hold a prompt of `tokens` tokens."""
        for stage in self.stages:
            stage.check_prompt(tokens)

    def check_head_dim(self, head_dim: int) -> None:
        """Raises the ValueError of the first stage that cannot compress rows of `head_dim` channels."""
        for stage in self.stages:
            stage.check_head_dim(head_dim)

    def compress(self, kv: KV, seen: Observed) -> KV:
        """The rows after the last stage."""
        for index, stage in enumerate(self.stages):
            kv = stage.compress(kv, replace(seen, seed=seen.seed + index * 0x9E3779B97F4A7C15))
        return kv


def stages_of(compressor: object) -> tuple[Compressor, ...]:
    """The stages of a pipeline, or the compressor itself. Raises TypeError for what is no Compressor."""
    if isinstance(compressor, Pipeline):
        return compressor.stages
    if isinstance(compressor, Compressor):
        return (compressor,)
    raise TypeError(f"{compressor!r} is no Compressor, so it cannot be joined with |")
