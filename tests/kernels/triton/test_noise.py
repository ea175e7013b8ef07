"""The noise of rows: the bits of the definition."""

import pytest
import torch
from kvcomp_kernels.noise import token_noise

from kvcomp import ops

from .helpers import LAYOUTS, assert_same_bits, call, integers, laid


def assert_noise(positions, seed=0, layer=0, round=0, layout="plain"):
    want = ops.token_noise(positions, seed, layer, round)
    assert_same_bits(call(token_noise, laid(positions, layout), seed, layer, round), want)


@pytest.mark.parametrize("rows", [1, 63, 64, 129, 1000, 1024, 2500])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 3), (3, 1)])
def test_every_shape(batch, heads, rows):
    assert_noise(integers(0, 40_000, (batch, heads, rows), dtype=torch.int32), 1, 2, 3)


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**31, 2**32 - 1, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)])
def test_every_seed(seed):
    assert_noise(integers(0, 999, (1, 2, 20)), seed)


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**64 + 5])
def test_seeds_beyond_64_signed_bits(seed):
    positions = integers(0, 999, (1, 2, 20))
    want = ops.token_noise(positions, (seed + 2**63) % 2**64 - 2**63, 0, 0)
    result = token_noise(laid(positions), seed, 0, 0)
    assert_same_bits(ops.token_noise(positions, seed, 0, 0), want)
    if result is not NotImplemented:
        assert_same_bits(result.cpu(), want)


@pytest.mark.parametrize("layer, round", [(1, 0), (0, 1), (61, 12), (1, 1), (2**31 - 1, 2**31 - 1), (0, 2**32 + 7)])
def test_every_layer_and_round(layer, round):
    assert_noise(integers(0, 999, (1, 2, 20)), 7, layer, round)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_and_large_positions(dtype):
    positions = torch.tensor([-2, -1, 0, 1, 2**24 + 1, 2**31 - 1, -(2**31)], dtype=dtype)
    assert_noise(positions.expand(2, 3, 7).contiguous(), 3, 1, 2)


def test_positions_count_modulo_2_to_the_32():
    assert_noise(torch.tensor([[[2**32, 2**32 + 5, 2**40 + 7, 2**63 - 1, -(2**63)]]]), 3, 1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_layout(layout, dtype):
    assert_noise(integers(0, 999, (2, 3, 37), dtype=dtype), 5, 1, 1, layout)


def test_positions_that_heads_share():
    positions = torch.arange(30, dtype=torch.int32)
    want = ops.token_noise(positions.expand(2, 3, 30), 5, 1, 1)
    assert_same_bits(call(token_noise, laid(positions).expand(2, 3, 30), 5, 1, 1), want)
    assert not torch.equal(want[:, 0], want[:, 1])
    by_text = integers(0, 999, (2, 1, 30))
    got = call(token_noise, laid(by_text).expand(2, 3, 30), 5, 1, 1)
    assert_same_bits(got, ops.token_noise(by_text.expand(2, 3, 30), 5, 1, 1))


def test_no_rows():
    assert_noise(torch.zeros(2, 3, 0, dtype=torch.int64))


@pytest.mark.parametrize("count", [1, 2, 16])
def test_numbers_that_a_compiler_may_specialise(count):
    assert_noise(integers(0, 999, (1, count, count)), count, count, count)
