"""Eviction methods: each is one file and one frozen dataclass."""

from collections.abc import Callable

from kvcomp.core import Compressor
from kvcomp.evict.base import ScoreEvictor
from kvcomp.evict.curdkv import CurDKV
from kvcomp.evict.expected_attention import ExpectedAttention
from kvcomp.evict.h2o import H2O
from kvcomp.evict.key_norm import KeyNorm
from kvcomp.evict.keydiff import KeyDiff
from kvcomp.evict.random import Random
from kvcomp.evict.replay import Replay
from kvcomp.evict.rkv import RKV
from kvcomp.evict.snapkv import SnapKV
from kvcomp.evict.streaming_llm import StreamingLLM
from kvcomp.evict.tova import TOVA
from kvcomp.evict.vase import VaSE
from kvcomp.evict.vatp import VATP

__all__ = [
    "H2O",
    "METHODS",
    "RKV",
    "TOVA",
    "VATP",
    "CurDKV",
    "ExpectedAttention",
    "KeyDiff",
    "KeyNorm",
    "Random",
    "Replay",
    "ScoreEvictor",
    "SnapKV",
    "StreamingLLM",
    "VaSE",
]


def _vase_dkv(budget: int, **settings: object) -> VaSE:
    return VaSE(budget, scorer="dkv", **settings)  # type: ignore[arg-type]


METHODS: dict[str, Callable[..., Compressor]] = {
    "vase-attnv": VaSE,
    "vase-dkv": _vase_dkv,
    "snapkv": SnapKV,
    "rkv": RKV,
    "rkv-simplified": RKV.simplified,
    "curdkv": CurDKV,
    "h2o": H2O,
    "streaming-llm": StreamingLLM,
    "tova": TOVA,
    "keydiff": KeyDiff,
    "key-norm": KeyNorm,
    "vatp": VATP,
    "expected-attention": ExpectedAttention,
    "random": Random,
    "replay": Replay,
}
"""Every method by the name that the command line and the experiments use; call with `budget`, `protect_prompt=...`."""
