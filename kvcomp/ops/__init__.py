"""Torch definitions of the operations that may have a kernel, and the choice between the two."""

from kvcomp.ops.decode import mixed_decode
from kvcomp.ops.dispatch import use_kernels
from kvcomp.ops.packed import hadamard, hadamard_block, narrowed, pack, packed_dot, packed_weighted_sum, unpack
from kvcomp.ops.score import (
    HeadScore,
    Logits,
    Magnitude,
    attention_logits,
    attention_mass,
    attention_score,
    average_pool,
    max_pool,
    squared_norm,
    value_magnitude,
    window_attention,
)

__all__ = [
    "HeadScore",
    "Logits",
    "Magnitude",
    "attention_logits",
    "attention_mass",
    "attention_score",
    "average_pool",
    "hadamard",
    "hadamard_block",
    "max_pool",
    "mixed_decode",
    "narrowed",
    "pack",
    "packed_dot",
    "packed_weighted_sum",
    "squared_norm",
    "unpack",
    "use_kernels",
    "value_magnitude",
    "window_attention",
]
