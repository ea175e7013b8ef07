"""How kernels are launched: tile sizes by operation and architecture, strides of their arguments, int64 offsets."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_GROUPS = 16
"""Groups of channels in a row beyond which packed rows are left to the definitions: kernels unroll over them."""
WIDEST = 256
"""Channels of the widest row that the tiles below were chosen for."""


@dataclass(frozen=True)
class Launch:
    """A tile has about `numbers` numbers of 16 bit, and from 16 to `most` rows; `programs` is how many programs a
    kernel that splits rows asks for, about four for each multiprocessor of a large device."""

    numbers: int
    warps: int = 4
    stages: int = 2
    most: int = 1024
    programs: int = 512

    def rows(self, width: int, bytes_each: int = 2) -> int:
        """Rows of a tile whose rows have `width` numbers, a power of two."""
        return max(16, min(self.most, 2 * self.numbers // (width * max(2, bytes_each))))

    def options(self, fused: bool) -> dict[str, int | bool]:
        """What a launch is given; `fused`: whether products may be fused with sums, which changes their last bit."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": fused}

    def splits(self, programs: int, tiles: int) -> int:
        """Into how many shares, at most 64, `programs` programs of `tiles` tiles each are split."""
        return max(1, min(64, tiles, self.programs // max(1, programs)))


TABLE: dict[str, dict[str, Launch]] = {
    "pack": {"default": Launch(8192, warps=8)},
    "unpack": {"default": Launch(16384), "gfx942": Launch(16384, warps=2)},
    "rotate": {"default": Launch(2048)},
    "take_rows": {"default": Launch(8192)},
    "value_range": {"default": Launch(4096)},
    "leverage": {"default": Launch(8192, most=64)},
    "score": {"default": Launch(8192, most=64), "gfx942": Launch(8192, most=64, stages=1)},
    "decode": {
        "default": Launch(8192, most=128),
        "sm_90": Launch(16384, most=128),
        "sm_100": Launch(16384, most=128),
        "gfx942": Launch(8192, most=128, stages=1),
    },
    "noise": {"default": Launch(1024)},
}
"""By operation and architecture (`sm_90`, `gfx942`, ...; `default` for all that are not named)."""


def launch(operation: str, x: Tensor) -> Launch:
    """The launch constants of `operation` on the device of `x`."""
    by_architecture = TABLE[operation]
    return by_architecture.get(_architecture(x.device), by_architecture["default"])


@functools.cache
def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def on_nvidia(x: Tensor) -> bool:
    """Whether `x` lives on a device with the tf32 tensor cores of NVIDIA."""
    return _architecture(x.device).startswith("sm_")


def spaced(x: Tensor) -> tuple[Tensor, int, int]:
    """`x` `[batch, kv_heads, rows, ...]`, copied only if its heads are not equally far apart or the channels of a row
    not side by side; the elements from a head to the next, and from a row to the next."""
    batch, heads = x.shape[:2]
    uneven = batch > 1 and heads > 1 and x.stride(0) != heads * x.stride(1)
    if uneven or x.ndim > 4 or (x.ndim == 4 and x.stride(3) != 1):
        x = x.contiguous()
    return x, x.stride(1) if heads > 1 else x.stride(0), x.stride(2)


@triton.jit
def offset(index, stride):
    """`index * stride` in 64 bit: a cache may have more than 2**31 elements."""
    return index.to(tl.int64) * stride
