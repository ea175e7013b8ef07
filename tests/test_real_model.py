"""SmolLM2-135M-Instruct on real text: what must hold beyond tiny random models."""

from dataclasses import dataclass
from pydoc_data import topics

import pytest
import torch

from kvcomp import CompressedCache, ops
from kvcomp.evict import CurDKV, Random, ScoreEvictor, VaSE
from kvcomp.quant import MixedPrecision

pytestmark = pytest.mark.real_model
LENGTH, CHUNK, BUDGET = 1536, 64, 256


@pytest.fixture(scope="module")
def text(smollm2):
    joined = "\n".join(topics.topics[name] for name in ("objects", "naming", "function"))
    return smollm2[1](joined, return_tensors="pt")["input_ids"][:, :LENGTH]


def loss(model, cache, text):
    """Mean negative log-likelihood of the second half, read in chunks."""
    losses = []
    for start in range(0, text.shape[1], CHUNK):
        logits = model(text[:, start : start + CHUNK], cache=cache).logits[0]
        targets = text[0, start + 1 : start + CHUNK + 1]
        losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    return float(torch.cat(losses)[text.shape[1] // 2 :].mean())


@dataclass(frozen=True)
class SmallestRanges(ScoreEvictor):
    """Keeps the rows with the smallest value range: the opposite of VaSE's reservation."""

    def score(self, kv, seen):
        return -ops.value_magnitude(kv)


def test_with_room_for_all_the_tokens_are_those_of_the_plain_cache(smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer(["The sum of two and two is", "A prime number is a number that"], return_tensors="pt",
                       padding=True, padding_side="left")  # fmt: skip
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    ours = model.generate(**inputs, max_new_tokens=40, do_sample=False, cache=CompressedCache(model, VaSE(256)))
    assert torch.equal(plain, ours)


def test_evicting_the_largest_ranges_is_worst_and_resampling_pays(smollm2, text):
    model = smollm2[0]
    methods = {
        "full": Random(LENGTH), "attnv": VaSE(BUDGET), "dkv": VaSE(BUDGET, scorer="dkv"), "fixed": CurDKV(BUDGET),
        "random": Random(BUDGET), "smallest": SmallestRanges(BUDGET),
    }  # fmt: skip
    losses = {name: loss(model, CompressedCache(model, method), text) for name, method in methods.items()}
    assert losses["full"] < losses["random"] < losses["smallest"]
    assert losses["dkv"] < losses["fixed"]
    assert losses["full"] < losses["attnv"] < losses["smallest"]


def test_quantization_stays_within_its_limits_alone_and_after_eviction(smollm2, text):
    model = smollm2[0]
    evicted, k8v4, rotated = VaSE(BUDGET), MixedPrecision.k8v4(), MixedPrecision.k4v4_rotated()
    methods = {"full": Random(LENGTH), "k8v4": k8v4, "rotated": rotated, "int2": MixedPrecision(2, exact=0.0)}
    methods |= {"evicted": evicted, "evicted | k8v4": evicted | k8v4}
    short = text[:, : LENGTH // 2]
    losses = {name: loss(model, CompressedCache(model, method), short) for name, method in methods.items()}
    assert abs(losses["k8v4"] - losses["full"]) < 0.005 and abs(losses["rotated"] - losses["full"]) < 0.02
    assert losses["evicted | k8v4"] - losses["evicted"] < 0.01
    assert losses["int2"] > losses["full"] + 0.3


def test_a_quarter_of_the_rows_holds_a_quarter_of_the_bytes(smollm2, text):
    model = smollm2[0]
    cache = CompressedCache(model, VaSE(LENGTH // 4 - 64))
    model(text, cache=cache)
    memory = cache.memory()
    assert memory.rows == LENGTH // 4 - 64 and memory.seen == LENGTH
    assert 4 * (memory.keys + memory.values) == memory.full
