"""What is timed: each operation with arguments of a real model's shapes, and what it is compared with."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.clock import GIB, Call, Clock
from kvcomp import dispatch, ops

SHORT = 64
"""Queries of a window, and recent rows."""


@dataclass(frozen=True)
class Sizes:
    """What is measured. `models`: query heads by model; the first of `rows` is the one of the table and the targets."""

    models: Mapping[str, int]
    kv_heads: int
    head_dim: int
    batches: tuple[int, ...]
    rows: tuple[int, ...]
    budget: int
    interval: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    copied: int
    repeats: int


QWEN3 = Sizes(
    models={"4B": 32, "14B": 40}, kv_heads=8, head_dim=128, batches=(16, 1), rows=(16384, 4096, 32768), budget=4096,
    interval=64, layers=36, hidden=2560, intermediate=9728, vocabulary=151936, copied=GIB, repeats=20,
)  # fmt: skip
TOY = Sizes(
    models={"4B": 4, "14B": 6}, kv_heads=2, head_dim=64, batches=(2, 1), rows=(192, 128), budget=160,
    interval=4, layers=2, hidden=64, intermediate=128, vocabulary=128, copied=2**20, repeats=2,
)  # fmt: skip


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """Operations run their kernels, or their definitions; kernels again afterwards."""
    ops.use_kernels(on)
    try:
        yield
    finally:
        ops.use_kernels(True)


@dataclass(frozen=True)
class Case:
    """One operation with its arguments. `reads`: bytes that it must read; `module`: where its kernel stands.

    `rotates`: the second argument is the query, rotated, and rotating it is part of the time.
    """

    name: str
    module: str
    operation: str
    arguments: tuple[Any, ...]
    reads: int
    rotates: bool = False

    def run(self, by_kernel: bool) -> tuple[Tensor, ...]:
        """The results of the kernel, if there is one, or of the definition."""
        with kernels(by_kernel):
            first, *others = self.arguments
            others[:1] = [ops.hadamard(first)] if self.rotates else others[:1]
            results = getattr(ops, self.operation)(first, *others)
        return results if isinstance(results, tuple) else (results,)

    @property
    def tolerance(self) -> float:
        """`difference` beyond which a kernel is wrong: packing, unpacking, moving and ranges must agree bit for bit."""
        return 0.0 if self.module == "pack" or self.operation == "value_range" else 0.05

    def has_kernel(self, device: torch.device) -> bool:
        """Whether a kernel takes these arguments."""
        kernel = getattr(dispatch._kernels(device.type, self.module), self.operation, None)
        return kernel is not None and kernel(*self.arguments) is not NotImplemented


@dataclass(frozen=True)
class Scene:
    """Random rows of one batch size and length."""

    sizes: Sizes
    clock: Clock
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, sizes: Sizes, clock: Clock, batch: int, rows: int) -> Scene:
        """bfloat16 rows; a few channels of the keys are large, as in real models."""
        shape = (batch, sizes.kv_heads, rows, sizes.head_dim)
        keys, values = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
        keys[..., :4] *= 8
        return cls(sizes, clock, keys, values)

    @property
    def rows(self) -> int:
        """Rows of each head."""
        return self.keys.shape[2]

    def positions(self, start: int, end: int) -> Tensor:
        """`[batch, kv_heads, end - start]`."""
        row = torch.arange(start, end, dtype=torch.int32, device=self.keys.device)
        return row.expand(*self.keys.shape[:2], -1).contiguous()

    def queries(self, model: str, count: int) -> Tensor:
        """`[batch, query_heads, count, head_dim]`."""
        shape = (self.keys.shape[0], self.sizes.models[model], count, self.sizes.head_dim)
        return torch.randn(shape, device=self.keys.device, dtype=torch.bfloat16)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def window_score(scene: Scene, model: str) -> Case:
    """As VaSE scores: a window of 64 queries over all rows but the 64 newest, averaged over 5 neighbours."""
    queries, newest = scene.queries(model, SHORT), scene.positions(scene.rows - SHORT, scene.rows)[:, 0]
    arguments = (
        queries, scene.keys, scene.values, scene.positions(0, scene.rows), newest,
        scene.sizes.head_dim**-0.5, SHORT, SHORT, 5, False,
    )  # fmt: skip
    return Case("window_score", "score", "window_score", arguments, nbytes(queries, scene.keys, scene.values))


def sketched_leverage(scene: Scene) -> Case:
    """Rank 20."""
    sketch = torch.randn(scene.sizes.kv_heads, scene.sizes.head_dim, 20, device=scene.keys.device)
    arguments = (scene.keys, scene.values, sketch)
    return Case("sketched_leverage", "score", "sketched_leverage", arguments, nbytes(*arguments))


def value_range(scene: Scene) -> Case:
    """Of all rows."""
    return Case("value_range", "score", "value_range", (scene.values,), nbytes(scene.values))


def pack(scene: Scene, bits: int, rotate: bool = False) -> Case:
    """All keys."""
    name = f"pack {bits} bit" + (", rotated" if rotate else "")
    arguments = (scene.keys, bits, group_size(scene.sizes, bits), torch.bfloat16, rotate)
    return Case(name, "pack", "pack", arguments, nbytes(scene.keys))


def unpack(scene: Scene, bits: int) -> Case:
    """All values."""
    packed, size = packed_rows(scene.values, scene.sizes, bits), group_size(scene.sizes, bits)
    arguments = (*packed, bits, size, scene.sizes.head_dim, torch.bfloat16)
    return Case(f"unpack {bits} bit", "pack", "unpack", arguments, nbytes(*packed))


def take_rows(scene: Scene) -> Case:
    """A random half of the keys, in time order."""
    noise = torch.rand(scene.keys.shape[:3], device=scene.keys.device)
    kept = noise.topk(scene.rows // 2).indices.sort(-1).values
    return Case("take_rows", "pack", "take_rows", (scene.keys, kept), nbytes(scene.keys) // 2 + nbytes(kept))


def group_size(sizes: Sizes, bits: int) -> int:
    """That of `MixedPrecision`."""
    return sizes.head_dim if bits == 8 else min(64, sizes.head_dim)


def packed_rows(rows: Tensor, sizes: Sizes, bits: int, rotate: bool = False) -> list[Tensor]:
    """Codes, scale and zero point, by the definition."""
    with kernels(False):
        return list(ops.pack(rows, bits, group_size(sizes, bits), torch.bfloat16, rotate))


DENSE, INT4 = "decode dense", "decode K4/V4 rotated"
DECODED = {"decode K8/V4": (8, 4, False), INT4: (4, 4, True), "decode K2/V2": (2, 2, False), DENSE: (4, 4, False)}
"""Bits of keys and of values, and whether keys are rotated."""


def packed_decode(scene: Scene, name: str, query: Tensor) -> Case:
    """One query over packed rows, 5 % exact and 64 recent ones; `DENSE`: over recent ones alone."""
    key_bits, value_bits, rotate = DECODED[name]
    exact, recent = (0, scene.rows) if name == DENSE else (round(0.05 * scene.rows), SHORT)
    packed, first = scene.rows - exact - recent, scene.rows - recent
    keys = packed_rows(scene.keys[:, :, :packed], scene.sizes, key_bits, rotate)
    values = packed_rows(scene.values[:, :, :packed], scene.sizes, value_bits)
    both = (scene.keys, scene.values)
    dense = [rows[:, :, packed:first].contiguous() for rows in both] + [in_buffer(rows[:, :, first:]) for rows in both]
    positions = [scene.positions(0, packed), scene.positions(packed, first)]
    positions.append(in_buffer(scene.positions(first, scene.rows)))
    bits, second = [key_bits, value_bits], query.float() if rotate else query
    groups = [group_size(scene.sizes, each) for each in bits]
    arguments = (query, second, keys, values, dense, positions, bits, groups, scene.sizes.head_dim**-0.5)
    return Case(name, "decode", "packed_decode", arguments, nbytes(query, *keys, *values, *dense, *positions), rotate)


def in_buffer(rows: Tensor) -> Tensor:
    """The same rows, in a buffer with room for 64 more, as a layer holds its recent ones."""
    return torch.cat([rows, rows[:, :, -SHORT:]], dim=2)[:, :, : rows.shape[2]]


def rivals(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    """Attention of one query over the rows in bfloat16."""
    folded = query.view(keys.shape[0], keys.shape[1], -1, keys.shape[3])
    attention = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Call] = {
        "sdpa folded": partial(attention, folded, keys, values),
        "sdpa enable_gqa": partial(attention, query, keys, values, enable_gqa=True),
    }
    if flash := flash_attn():
        laid_out = [tensor.transpose(1, 2) for tensor in (query, keys, values)]  # [batch, rows, heads, head_dim]
        seen = torch.full((keys.shape[0],), keys.shape[2], dtype=torch.int32, device=keys.device)
        found["flash_attn_func"] = partial(flash.flash_attn_func, *laid_out)
        found["flash_attn_with_kvcache"] = partial(flash.flash_attn_with_kvcache, *laid_out, cache_seqlens=seen)
    return found


def flash_attn() -> Any:
    """The package, or None if it cannot be imported."""
    try:
        return importlib.import_module("flash_attn")
    except ImportError:
        return None
