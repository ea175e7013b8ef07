"""A cache on disk: one safetensors file with the tensors of every layer and a JSON header."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcomp import checks, evict, quant
from kvcomp.core import KV, Compressor
from kvcomp.counters import Counters
from kvcomp.layer import CompressedLayer
from kvcomp.pipeline import Pipeline
from kvcomp.quant.mixed import MixedKV, Packed
from kvcomp.quant.packed import PackedRows

if TYPE_CHECKING:
    from kvcomp.cache import CompressedCache

FORMAT = 2
ROW_TENSORS = ("keys", "values", "positions", "mass")


def to_settings(compressor: Compressor) -> dict[str, Any]:
    """A compressor as JSON: `{"method": class name, field: value, ...}`."""
    if isinstance(compressor, Pipeline):
        return {"method": "Pipeline", "stages": [to_settings(stage) for stage in compressor.stages]}
    if not dataclasses.is_dataclass(compressor):
        raise ValueError(f"cannot save the settings of {compressor!r}: it is no dataclass")
    fields = {field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor) if field.init}
    method = type(compressor)
    own = method in _own_methods().values()
    return {"method": method.__name__ if own else f"{method.__module__}.{method.__qualname__}", **fields}


def from_settings(settings: dict[str, Any]) -> Compressor:
    """The inverse of `to_settings` for kvcomp's own methods. Raises ValueError for another method."""
    fields = {name: value for name, value in settings.items() if name != "method"}
    if settings["method"] == "Pipeline":
        return Pipeline(tuple(from_settings(stage) for stage in fields["stages"]))
    method = _own_methods().get(settings["method"])
    if method is None:
        raise ValueError(
            f"{settings['method']!r} is no method of kvcomp: pass the compressor to load(path, model, compressor)"
        )
    return method(**fields)


def _own_methods() -> dict[str, Any]:
    exported = [getattr(package, name) for package in (evict, quant) for name in package.__all__]
    bases = (evict.ScoreEvictor, quant.Quantizer)
    return {kind.__name__: kind for kind in exported if isinstance(kind, type) and issubclass(kind, bases)}


def model_shape(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What must be equal for a cache to fit a model."""
    names = ["model_type", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"]
    shape = {name: getattr(config, name, None) for name in names}
    return {**shape, "kv_shapes": [list(shape) for shape in checks.kv_shapes(config)], "dtype": str(dtype)}


def write(cache: CompressedCache, path: str | os.PathLike[str]) -> None:
    """Writes `cache` to `path`; an older file there stays whole until the new one is complete."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        parts, fields = _compressed_state(layer) if isinstance(layer, CompressedLayer) else _stock_state(layer)
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in parts.items()}
        layers.append(fields)
    header = {
        "format": FORMAT, "compressor": to_settings(cache.compressor), "interval": cache.interval, "seed": cache.seed,
        "model": cache.model_shape, "layers": layers,
    }  # fmt: skip
    temporary = f"{os.fspath(path)}.part"
    save_file(tensors, temporary, metadata={"kvcomp": json.dumps(header)})
    os.replace(temporary, path)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that `write` wrote. Raises ValueError if it is something else."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); save the cache again") from error
    if "kvcomp" not in metadata:
        raise ValueError(f"{path} is no saved CompressedCache: it has no kvcomp header")
    header = json.loads(metadata["kvcomp"])
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} has format {header.get('format')}, this version of kvcomp reads format {FORMAT}")
    return header, tensors


def restore(
    cache: CompressedCache, header: dict[str, Any], tensors: dict[str, Tensor], devices: list[torch.device]
) -> None:
    """Fills a fresh `cache`, layer `i` on `devices[i]`. Raises ValueError, before that, if the file is of another
    model."""
    if header["model"] != cache.model_shape or len(header["layers"]) != len(cache.layers):
        raise ValueError(f"the file holds a cache of {header['model']}, the model is {cache.model_shape}")
    for index, (layer, fields) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        own = {name: tensor.to(devices[index]) for name, tensor in tensors.items() if name.startswith(f"{index}.")}
        parts = {name.split(".", 1)[1]: tensor for name, tensor in own.items()}
        if isinstance(layer, CompressedLayer):
            _restore_compressed(layer, fields, parts)
        elif parts:
            layer.lazy_initialization(parts["keys"], parts["values"])
            layer.keys, layer.values = parts["keys"], parts["values"]
            for name, value in fields.items():
                setattr(layer, name, value)


def _compressed_state(layer: CompressedLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    fields = {name: getattr(layer, name) for name in ("scaling", "record_past")}
    fields |= {"count": dataclasses.asdict(layer.count), "forgot": layer.recent_queries.forgot}
    if not layer.is_initialized:
        return {}, fields
    parts, fields["rows"] = _rows_state(layer.storage.kv)
    if layer.prompt_end is not None:
        parts["prompt_end"] = layer.prompt_end
    if layer.recent_queries.buffer is not None:
        parts |= {"queries": layer.recent_queries.queries, "query_positions": layer.recent_queries.positions}
    if layer.remembered.rows is not None and layer.remembered.positions is not None:
        parts |= {f"remembered.{name}": tensor for name, tensor in layer.remembered.rows.tensors.items()}
        parts["remembered.positions"] = layer.remembered.positions
        fields["remembered"] = _packing(layer.remembered.rows)
    return parts, fields


def _restore_compressed(layer: CompressedLayer, fields: dict[str, Any], parts: dict[str, Tensor]) -> None:
    layer.count = Counters(**fields["count"])
    layer.scaling, layer.record_past = fields["scaling"], fields["record_past"]
    if "keys" not in parts:
        return
    layer.storage.replace(_rows_of(fields["rows"], parts))
    layer.prompt_end = parts.get("prompt_end")
    if "queries" in parts:
        layer.recent_queries.spare = parts["queries"].shape[2]
        layer.recent_queries.append(parts["queries"], parts["query_positions"])
    layer.recent_queries.forgot = fields["forgot"]
    if "remembered" in fields:
        layer.remembered.positions = parts.pop("remembered.positions")
        layer.remembered.rows = _packed_rows(fields["remembered"], _under("remembered.", parts, every=True))


def _rows_state(kv: KV) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the rows, and how to read them: `{}` if none is packed."""
    if not isinstance(kv, MixedKV):
        return _named("", kv), {}
    parts = _named("", kv.recent) | _named("exact.", kv.exact) | _named("packed.", kv.packed)
    fields: dict[str, Any] = {"count": kv.rows}
    for side in ("keys", "values"):
        rows: PackedRows = parts.pop(f"packed.{side}")
        parts |= {f"packed.{side}.{name}": tensor for name, tensor in rows.tensors.items()}
        fields[side] = _packing(rows)
    return parts, fields


def _packing(rows: PackedRows) -> dict[str, Any]:
    """All of packed rows but their tensors."""
    return {"kind": type(rows).__name__, **rows.settings, "dtype": str(rows.dtype).removeprefix("torch.")}


def _packed_rows(fields: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The inverse of `_packing`."""
    settings = {name: value for name, value in fields.items() if name != "kind"}
    settings["dtype"] = getattr(torch, settings["dtype"])
    return getattr(quant, fields["kind"])(**settings, **tensors)


def _rows_of(fields: dict[str, Any], parts: dict[str, Tensor]) -> KV:
    """The inverse of `_rows_state`."""
    recent = KV(**_under("", parts))
    if not fields:
        return recent
    packed = _under("packed.", parts)
    for side in ("keys", "values"):
        packed[side] = _packed_rows(fields[side], _under(f"packed.{side}.", parts, every=True))
    return MixedKV(Packed(**packed), KV(**_under("exact.", parts)), recent, fields["count"])


def _named(prefix: str, rows: KV | Packed) -> dict[str, Any]:
    held = {name: getattr(rows, name) for name in ROW_TENSORS}
    return {prefix + name: value for name, value in held.items() if value is not None}


def _under(prefix: str, parts: dict[str, Tensor], every: bool = False) -> dict[str, Any]:
    names = [name.removeprefix(prefix) for name in parts if name.startswith(prefix)]
    return {name: parts[prefix + name] for name in names if every or name in ROW_TENSORS}


def _stock_state(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not hasattr(layer, "keys"):
        raise NotImplementedError(
            f"cannot save a cache with layers of {type(layer).__name__}: only attention layers are supported"
        )
    names = ("cumulative_length", "record_past")
    fields = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    if not isinstance(layer.keys, torch.Tensor):
        return {}, fields
    return {"keys": layer.keys, "values": layer.values}, fields
