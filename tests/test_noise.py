"""Counter-based random numbers: their law, their independence, and the exact numbers."""

import itertools
import math

import pytest
import torch

from kvcomp import noise

COUNT = 100_000
INDEX = torch.arange(COUNT)
COUNTERS = (3, 1, 4, 1)
GOLDEN_ZERO = [12251803, 15332451, 3105001, 13464771, 13356457]
GOLDEN_COUNTERS = [13763187, 16631259, 15491877, 6747761, 6038451]
GOLDEN_SKETCH = [11000223, 8804295, 2199249, 12659903, 7693833]
GOLDEN_NORMAL = [-0.447949, -1.29215, -0.048437, -1.303709]


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])


def bits(x):
    """The number as the integer `x * 2**24`."""
    return (x.double() * 2**24).long()


def test_numbers_never_change():
    """Kept sets of a saved cache or a published run depend on them."""
    last = torch.tensor([0, 1, 63, 4096, -1])
    assert bits(noise.uniform(last, 0, 0, 0, 0)).tolist() == GOLDEN_ZERO
    assert bits(noise.uniform(last, 2**63 + 5, 17, 3, torch.tensor(7))).tolist() == GOLDEN_COUNTERS
    assert bits(noise.uniform(last, 0, 0, 0, 0, stream=noise.SKETCH)).tolist() == GOLDEN_SKETCH
    torch.testing.assert_close(noise.normal((4,), 0, 0, 0), torch.tensor(GOLDEN_NORMAL), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counters", [(7,), (0, 0, 0, 0), COUNTERS, (2**63, 35, 1000, 7)], ids=str)
def test_numbers_are_uniform(counters):
    x = noise.uniform(INDEX, *counters).double()
    assert abs(float(x.mean()) - 0.5) < 4.5 * (1 / 12 / COUNT) ** 0.5
    assert abs(float(x.var()) - 1 / 12) < 4.5 * (1 / 180 / COUNT) ** 0.5
    expected = (torch.arange(COUNT) + 0.5) / COUNT
    assert float((x.sort().values - expected).abs().max()) < 2.0 * COUNT**-0.5  # Kolmogorov-Smirnov, p = 0.0007


def test_numbers_are_inside_the_open_interval_and_multiples_of_two_to_the_minus_24():
    x = noise.uniform(INDEX, *COUNTERS)
    assert x.dtype == torch.float32
    assert float(x.min()) > 0 and float(x.max()) < 1
    assert torch.equal(bits(x).float() * 2.0**-24, x)
    assert bool((-(-x.log()).log()).isfinite().all())


def test_neighbouring_numbers_are_uncorrelated():
    x = noise.uniform(INDEX, *COUNTERS)
    for lag in (1, 2, 3, 4, 64, 128):
        assert abs(correlation(x[lag:], x[:-lag])) < 4.5 * COUNT**-0.5


def test_streams_of_different_counters_are_uncorrelated():
    changed = [(4, 1, 4, 1), (3, 2, 4, 1), (3, 1, 5, 1), (3, 1, 4, 2), (1, 3, 4, 1), (3, 1, 1, 4), (3 + 2**32, 1, 4, 1)]
    streams = [noise.uniform(INDEX, *counters) for counters in (COUNTERS, *changed)]
    streams.append(noise.uniform(INDEX, *COUNTERS, stream=noise.SKETCH))
    for one, other in itertools.combinations(streams, 2):
        assert abs(correlation(one, other)) < 4.5 * COUNT**-0.5


@pytest.mark.parametrize("place", range(4))
def test_every_bit_of_every_counter_changes_half_of_the_bits(place):
    index = INDEX[:2000]
    x = bits(noise.uniform(index, *COUNTERS))
    for bit in range(64 if place == 0 else 32):
        counters = list(COUNTERS)
        counters[place] ^= 1 << bit
        flipped = x ^ bits(noise.uniform(index, *counters))
        share = sum(float(((flipped >> position) & 1).float().mean()) for position in range(1, 24)) / 23
        assert abs(share - 0.5) < 0.02


def test_seed_counts_modulo_two_to_the_64():
    for seed in (0, 5, 2**63 + 5):
        x = noise.uniform(INDEX[:50], seed, 1)
        assert torch.equal(x, noise.uniform(INDEX[:50], seed + 2**64, 1))
        assert torch.equal(x, noise.uniform(INDEX[:50], seed - 2**64, 1))
        assert not torch.equal(x, noise.uniform(INDEX[:50], seed + 2**32, 1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_dtype_of_tensor_counters_does_not_matter(dtype):
    last, head = torch.arange(-2, 300), torch.arange(3)[:, None]
    expected = noise.uniform(last, *COUNTERS[:3], head)
    assert torch.equal(noise.uniform(last.to(dtype), *COUNTERS[:3], head.to(dtype)), expected)


def test_number_depends_on_its_counters_and_on_nothing_beside_it():
    head = torch.arange(3)[:, None]
    x = noise.uniform(INDEX[:50].expand(2, 3, 50), *COUNTERS[:3], head)
    assert x.shape == (2, 3, 50)
    assert torch.equal(x[0], x[1])
    assert torch.equal(noise.uniform(INDEX[40:45], *COUNTERS[:3], head[2]), x[0, 2, 40:45])
    torch.manual_seed(123)
    assert torch.equal(noise.uniform(INDEX[:50].expand(2, 3, 50), *COUNTERS[:3], head), x)


def test_numbers_rarely_repeat():
    distinct = len(noise.uniform(INDEX, *COUNTERS).unique())
    expected = 2**23 * (1 - math.exp(-COUNT / 2**23))  # birthday problem
    assert abs(distinct - expected) < 5 * (COUNT - expected) ** 0.5


def test_normal_numbers_have_the_moments_and_quartiles_of_the_normal_law():
    x = noise.normal((COUNT,), *COUNTERS).double()
    assert bool(x.isfinite().all())
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        error = math.sqrt((math.prod(range(1, 2 * power, 2)) - moment**2) / COUNT)
        assert abs(float((x**power).mean()) - moment) < 4.5 * error
    assert abs(float((x.abs() < 0.6744898).double().mean()) - 0.5) < 4.5 * 0.5 * COUNT**-0.5
    assert abs(correlation(x[1:], x[:-1])) < 4.5 * COUNT**-0.5


def test_normal_numbers_of_each_head_are_its_own():
    x = noise.normal((1, 50, 4), 0, 0, 0, torch.arange(3)[:, None, None])
    assert x.shape == (3, 50, 4)
    assert all(not torch.isclose(one, other).any() for one, other in itertools.combinations(x, 2))
