"""Compressors as text."""

import pytest

from kvcomp.core import KV, Observed
from kvcomp.evict import METHODS, SnapKV, VaSE
from kvcomp.quant import MixedPrecision
from kvcomp.quant.spec import Full, describe, parse_compressor


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("k8v4", MixedPrecision.k8v4()),
        ("k4v4_rotated", MixedPrecision.k4v4_rotated()),
        ("k4v4-rotated", MixedPrecision.k4v4_rotated()),
        ("int4", MixedPrecision(4, exact=0.0)),
        ("int8 g32 sinks=0", MixedPrecision(key_bits=8, value_bits=8, group_size=32, sinks=0, exact=0.0)),
        ("g64 int4 exact=0.05", MixedPrecision(4, group_size=64, exact=0.05)),
        ("int2 exact=0.1 exact_by=random recent=0", MixedPrecision(
            key_bits=2, value_bits=2, exact=0.1, exact_by="random", recent=0)),
        ("k4 v2 rotated", MixedPrecision(key_bits=4, value_bits=2, rotate_keys=True, exact=0.0)),
        ("int4 exact=1e-2", MixedPrecision(4, exact=0.01)),
        ("full", Full()),
        ("snapkv budget=128 window=32", SnapKV(128, window=32)),
        ("vase-attnv budget=512 stochastic=False | k8v4", VaSE(512, stochastic=False) | MixedPrecision.k8v4()),
    ],
)  # fmt: skip
def test_texts_and_back(text, compressor):
    found = parse_compressor(text)
    if isinstance(found, MixedPrecision):  # `bits` is only a default of the other two
        assert repr(found) == repr(compressor)
    else:
        assert repr(found) == repr(compressor) and type(found) is type(compressor)
    assert repr(parse_compressor(describe(found))) == repr(found)


@pytest.mark.parametrize("text", ["nf4", "fp4 g64 exact=0.1", "bnb_int8 g32 sinks=2"])
def test_bitsandbytes(text):
    pytest.importorskip("bitsandbytes")
    found = parse_compressor(text)
    assert type(found).__name__ == "BitsAndBytes" and describe(found) == text
    with pytest.raises(ValueError, match="nf4 takes no rotate_keys"):
        parse_compressor("nf4 rotated")


@pytest.mark.parametrize("name", METHODS)
def test_every_evictor_can_be_written_and_described(name):
    found = parse_compressor(f"{name} budget=512")
    again = parse_compressor(describe(found)) if describe(found).split()[0] in METHODS else found
    assert repr(again) == repr(found) and found.budget == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5 g64", r"unknown word 'int5' in 'int5 g64'; known: settings k8v4"),
        ("int4 foo=1", "unknown word 'foo=1'"),
        ("int4 exact", "unknown word 'exact'"),
        ("", "no compressor in ''; known"),
        ("k8v4 |", "no compressor in 'k8v4 |'"),
        ("int4 int8", "says bits twice"),
        ("int4 k8", "says bits twice"),
        ("k8v4 g32 g64", "says group_size twice"),
        ("k8", "does not say value_bits; known"),
        ("g64", "does not say key_bits"),
        ("full g64", "takes no other word"),
        ("k3v4", "key_bits must be 2, 4 or 8, got 3"),
        ("int4 g0", "group_size must be at least 1, got 0"),
        ("int4 exact=1.5", r"exact is a share of the rows, 0 to 1, got 1.5"),
        ("int4 exact_by=size", "exact_by must be one of"),
        ("int4 recent=-1", "recent must be at least 0"),
        ("snapkv budget=128 budget=64", "says budget twice"),
        ("snapkv budget=128 window", "snapkv takes settings name=value, got 'window'"),
        ("int4=", "unknown word 'int4='"),
        ("int4 rotated=", "unknown word 'rotated='"),
        ("snapkv", "snapkv needs a budget"),
        ("snapkv budget=128 bits=4", "does not take the settings"),
        ("k8v4 | int4", "can pack rows once"),
    ],
)
def test_mistakes_name_the_word_and_what_is_known(text, message):
    with pytest.raises(ValueError, match=message):
        parse_compressor(text)


class Other(MixedPrecision):
    pass


def test_what_differs_has_another_text():
    exact = 0.1 + 2**-40
    assert parse_compressor(describe(MixedPrecision(4, exact=exact))).exact == exact
    assert describe(Other(4)) == repr(Other(4)) != describe(MixedPrecision(4))
    assert describe(Full(window=3)) == "Full(window=3)" and describe(Full()) == "full"


def test_full_keeps_the_rows_it_gets():
    import torch

    kv = KV.of(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8))
    assert Full().compress(kv, Observed()) is kv and Full().budget is None and Full(window=7).window == 7
