"""Rotary position embedding of a layer: rotate to a position, or undo it, with angles in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """RoPE in the half-split layout (channel `j` turns with channel `j + rotary_dim / 2`; Su et al., arXiv 2104.09864).

    `frequencies` `[rotary_dim / 2]` in radians per position; channels beyond `rotary_dim` do not turn. `scaling`
    multiplies rotated channels (YaRN's attention factor; 1 otherwise).
    """

    frequencies: Float[Tensor, " pairs"]
    scaling: float = 1.0

    def rotate(self, x: Tensor, positions: Int[Tensor, "..."]) -> Tensor:
        """`x` `[..., tokens, head_dim]` turned from position 0 to `positions` `[..., tokens]`, in float32."""
        return self._turn(x, positions, 1.0, self.scaling)

    def unrotate(self, x: Tensor, positions: Int[Tensor, "..."]) -> Tensor:
        """The inverse of `rotate`: `x` as it was before RoPE, in float32."""
        return self._turn(x, positions, -1.0, 1.0 / self.scaling)

    def mean_rotation(self, positions: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """Mean cosine and sine over the last axis of `positions`, each `[..., pairs]`, times `scaling`."""
        angles = positions[..., None].float() * self.frequencies.to(positions.device).float()
        return angles.cos().mean(-2) * self.scaling, angles.sin().mean(-2) * self.scaling

    def _turn(self, x: Tensor, positions: Tensor, direction: float, scaling: float) -> Tensor:
        angles = positions[..., None].float() * self.frequencies.to(x.device).float() * direction
        return turn(x, angles.cos() * scaling, angles.sin() * scaling)


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`x` `[..., head_dim]` with its first `2 * pairs` channels rotated by angles given as `[..., pairs]`, in
    float32."""
    pairs = cosine.shape[-1]
    first, second, rest = x.float().split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)
