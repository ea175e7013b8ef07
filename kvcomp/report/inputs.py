"""What a user hands in: tensors or arrays of one layer or several, and compressors as texts or objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcomp.core import KV, Compressor, Observed
from kvcomp.quant.spec import describe, parse_compressor

Array: TypeAlias = Tensor | NDArray[Any]
GivenLayers: TypeAlias = Array | Sequence[Array]
Compressors: TypeAlias = Sequence[Compressor | str] | Mapping[str, Compressor | str]
DEFAULT = ("k8v4", "k4v4_rotated", "int4 g64", "int4 g64 exact=0.05")
"""Compressors of a report that names none."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_sinks(sinks: int) -> None:
    """Raises ValueError for what is no number of tokens."""
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise ValueError(f"sinks must be an int of at least 0, got {sinks!r}")


def named(compressors: Compressors) -> dict[str, Compressor]:
    """Compressors by name: the key of a mapping, the text of a string, else `describe`. Raises ValueError for a text
    that cannot be read or a name given twice, TypeError for what is no compressor."""
    if isinstance(compressors, str):
        raise TypeError(f"compressors is a list: write [{compressors!r}]")
    pairs = compressors.items() if isinstance(compressors, Mapping) else ((None, each) for each in compressors)
    found: dict[str, Compressor] = {}
    texts: dict[str, str] = {}
    for name, given in pairs:
        compressor = parse_compressor(given) if isinstance(given, str) else given
        if not isinstance(compressor, Compressor):
            raise TypeError(f"{compressor!r} is no Compressor: pass for example kvcomp.quant.MixedPrecision.k8v4()")
        name = name or (" ".join(given.split()) if isinstance(given, str) else describe(compressor))
        if name in found:
            raise ValueError(f"the compressor {name!r} is given twice")
        if not isinstance(compressors, Mapping):  # whose names may well stand for the same
            same = texts.setdefault(describe(compressor), name)
            if same != name:
                raise ValueError(f"the compressor {same!r} is given twice, also as {name!r}")
        found[name] = compressor
    if not found:
        raise ValueError("there is no compressor to report on, give at least 1")
    return found


def layers_of(
    keys: GivenLayers, values: GivenLayers, queries: GivenLayers | None, scaling: float | None, seed: int
) -> list[tuple[KV, Observed]]:
    """Rows and queries of each layer. Raises ValueError for shapes that do not fit, layers that differ in heads, widths
    or dtype, dtypes other than float16, bfloat16 and float32 (float64 becomes float32), NaN and infinity."""
    k, v = _listed(keys), _listed(values)
    q: Sequence[Array | None] = [None] * len(k) if queries is None else _listed(queries)
    if not k or not len(k) == len(v) == len(q):
        raise ValueError(
            f"keys, values and queries need the same number of layers, at least 1, got {len(k)}, {len(v)}, {len(q)}"
        )
    layers = [_layer(index, *sides, scaling, seed) for index, sides in enumerate(zip(k, v, q, strict=True))]
    for index, (kv, _) in enumerate(layers):
        if _kind(kv) != _kind(layers[0][0]):
            raise ValueError(
                f"layer {index} has other heads, widths or another dtype than layer 0 ({_kind(kv)} and "
                f"{_kind(layers[0][0])}), so means over both say little: report on them one by one"
            )
    return layers


def _kind(kv: KV) -> str:
    """What all layers of a report share."""
    heads, widths = kv.keys.shape[1], f"{kv.keys.shape[-1]} and {kv.values.shape[-1]}"
    return f"{heads} KV heads of {widths} channels in {str(kv.keys.dtype).removeprefix('torch.')}"


def _listed(side: GivenLayers) -> list[Array]:
    return [side] if isinstance(side, Tensor | np.ndarray) else list(side)


def _layer(
    index: int, keys: Array, values: Array, queries: Array | None, scaling: float | None, seed: int
) -> tuple[KV, Observed]:
    k, v = _tensor("keys", keys, index), _tensor("values", values, index)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"layer {index}: keys {list(k.shape)} and values {list(v.shape)} differ in batch, heads or tokens"
        )
    if k.dtype != v.dtype:
        raise ValueError(f"layer {index}: keys are {k.dtype}, values {v.dtype}; give both in one dtype")
    kv = KV.of(k, v)
    if queries is None:
        return kv, Observed(scaling=scaling, layer=index, seed=seed)
    q = _tensor("queries", queries, index, k.dtype)
    fits = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0
    if not fits or q.shape[2] > k.shape[2]:
        raise ValueError(
            f"layer {index}: queries {list(q.shape)} do not fit keys {list(k.shape)}: the batch and head_dim must be "
            "equal, query heads a multiple of KV heads, and the queries those of the newest tokens"
        )
    positions = kv.positions[:, 0, k.shape[2] - q.shape[2] :]
    return kv, Observed(q, positions, scaling, index, seed=seed)


def _tensor(name: str, given: Array, layer: int, dtype: torch.dtype | None = None) -> Tensor:
    """`given`, checked after it is cast, as a number may become infinite in another dtype."""
    if isinstance(given, np.ndarray):
        if given.dtype.kind not in "fiub":
            raise ValueError(f"layer {layer}: {name} must be float16, bfloat16 or float32, got {given.dtype}")
        # A copy: torch takes neither another byte order nor, without a warning, what is read-only.
        tensor = torch.from_numpy(np.array(given, dtype=given.dtype.newbyteorder("=")))
    elif isinstance(given, Tensor):
        tensor = given.detach()
    else:
        raise TypeError(f"layer {layer}: {name} must be a tensor or an array, got {type(given).__name__}")
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    if tensor.ndim != 4 or not tensor.numel():
        raise ValueError(
            f"layer {layer}: {name} must be [batch, heads, tokens, head_dim] and not empty, got {list(tensor.shape)}"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(f"layer {layer}: {name} must be float16, bfloat16 or float32, got {tensor.dtype}")
    tensor = tensor if dtype is None else tensor.to(dtype)
    bad = int((~tensor.isfinite()).any(-1).sum())
    if bad:
        raise ValueError(
            f"layer {layer}: {bad} {name} are NaN or infinite in {str(tensor.dtype).removeprefix('torch.')}, so there "
            "is no error to measure; leave these rows out"
        )
    return tensor.cpu() if tensor.device.type == "mps" else tensor  # which has no float64
