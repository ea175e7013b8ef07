"""Torch definitions of the operations that may have a kernel; `kvcomp.dispatch` chooses between the two."""

from kvcomp.core import take_rows
from kvcomp.dispatch import use_kernels
from kvcomp.noise import token_noise
from kvcomp.ops.decode import attend, packed_decode
from kvcomp.ops.packed import hadamard, hadamard_block, narrowed, pack, packed_dot, packed_weighted_sum, rows_at, unpack
from kvcomp.ops.score import (
    HeadScore,
    Logits,
    Magnitude,
    attention_and_range,
    attention_logits,
    attention_mass,
    attention_score,
    average_pool,
    max_pool,
    pooled_attention,
    sketched_leverage,
    squared_norm,
    value_magnitude,
    value_range,
    window_attention,
    window_score,
)

__all__ = [
    "HeadScore",
    "Logits",
    "Magnitude",
    "attend",
    "attention_and_range",
    "attention_logits",
    "attention_mass",
    "attention_score",
    "average_pool",
    "hadamard",
    "hadamard_block",
    "max_pool",
    "narrowed",
    "pack",
    "packed_decode",
    "packed_dot",
    "packed_weighted_sum",
    "pooled_attention",
    "rows_at",
    "sketched_leverage",
    "squared_norm",
    "take_rows",
    "token_noise",
    "unpack",
    "use_kernels",
    "value_magnitude",
    "value_range",
    "window_attention",
    "window_score",
]
