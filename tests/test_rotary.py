"""The rotary embedding against float64, at positions that bfloat16 and float32 angles get wrong."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcomp.rotary import Rotary, turn

CHANNELS, TOKENS = 16, 64
FREQUENCIES = 10000.0 ** -(torch.arange(CHANNELS // 2) / (CHANNELS // 2))
ROTARY = Rotary(FREQUENCIES)
YARN = Rotary(FREQUENCIES[:6], scaling=1.25)  # turns 12 of the 16 channels
starts = pytest.mark.parametrize("start", [0, 250, 60000])
rotaries = pytest.mark.parametrize("rotary", [ROTARY, YARN], ids=["whole", "partial-scaled"])


def keys(dtype=torch.float32):
    return torch.randn(2, 3, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0)).to(dtype)


def positions(start):
    """Other positions for every row: `start` to `start + 63`, the second batch row one later."""
    return torch.arange(start, start + TOKENS, dtype=torch.int32) + torch.tensor([0, 1])[:, None, None]


def relative_error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def rotated_by_loop(rotary, x, position):
    """One token in float64."""
    x, pairs = x.double().tolist(), len(rotary.frequencies)
    for pair, frequency in enumerate(rotary.frequencies.double().tolist()):
        cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
        first, second = x[pair], x[pair + pairs]
        x[pair] = (first * cosine - second * sine) * rotary.scaling
        x[pair + pairs] = (second * cosine + first * sine) * rotary.scaling
    return x


def rotated(rotary, x, at):
    at = at.expand(x.shape[:3])
    tokens = [
        rotated_by_loop(rotary, token, int(position))
        for token, position in zip(x.view(-1, CHANNELS), at.flatten(), strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.float64).view(x.shape)


# At position 60000 the float32 angle itself is off by up to 0.002 rad, as in the model.
@pytest.mark.parametrize(("start", "tolerance"), [(0, 1e-5), (250, 1e-4), (60000, 1e-2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@rotaries
def test_rotation_equals_float64(rotary, dtype, start, tolerance):
    got = rotary.rotate(keys(dtype), positions(start))
    assert got.dtype == torch.float32
    assert relative_error(got, rotated(rotary, keys(dtype), positions(start))) < tolerance


@starts
@rotaries
def test_unrotation_of_keys_rotated_in_float64_and_stored_in_bfloat16_gives_them_back(rotary, start):
    stored = rotated(rotary, keys(), positions(start)).to(torch.bfloat16)
    back = rotary.unrotate(stored, positions(start))
    assert back.dtype == torch.float32
    assert relative_error(back, keys().double()) < 1e-2


@starts
@rotaries
def test_round_trip_is_exact_up_to_float32(rotary, start):
    back = rotary.unrotate(rotary.rotate(keys(), positions(start)), positions(start))
    torch.testing.assert_close(back, keys(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("position", [0, 256, 60000])
def test_neighbouring_positions_get_different_angles(position):
    """In bfloat16, 256 and 257 are the same number."""
    x = torch.zeros(1, CHANNELS)
    x[0, 0] = 1.0
    one, next_one = (ROTARY.rotate(x.to(torch.bfloat16), torch.tensor([position + step])) for step in (0, 1))
    angle = math.acos(float((one * next_one).sum()))
    assert abs(angle - 1.0) < 5e-3  # the first pair turns by 1 rad per position


@starts
def test_products_depend_on_the_distance_only(start):
    query, key = keys()[:1, :1], keys()[1:, 1:2]
    at = torch.arange(TOKENS)
    near = (ROTARY.rotate(query, at + 5) * ROTARY.rotate(key, at)).sum(-1)
    far = (ROTARY.rotate(query, at + 5 + start) * ROTARY.rotate(key, at + start)).sum(-1)
    torch.testing.assert_close(near, far, rtol=0, atol=2e-6 + 1e-6 * start)  # float32 angles


def test_rotation_equals_that_of_the_model():
    config = LlamaConfig(hidden_size=CHANNELS, num_attention_heads=1, head_dim=CHANNELS, max_position_embeddings=65536)
    at = torch.arange(60000, 60000 + TOKENS)[None]
    embedding = LlamaRotaryEmbedding(config)
    expected, _ = apply_rotary_pos_emb(keys()[:1], keys()[:1], *embedding(keys(), at))
    got = Rotary(embedding.inv_freq, embedding.attention_scaling).rotate(keys()[:1], at[:, None])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_channels_beyond_the_rotary_ones_do_not_turn():
    got = YARN.rotate(keys(), positions(250))
    assert torch.equal(got[..., 12:], keys()[..., 12:])
    assert not torch.isclose(got[..., :12], keys()[..., :12]).all(-1).any()


@starts
@rotaries
def test_mean_rotation_equals_the_mean_over_positions(rotary, start):
    at = positions(start)
    cosine, sine = rotary.mean_rotation(at)
    assert cosine.shape == sine.shape == (2, 1, len(rotary.frequencies))
    for batch in range(2):
        for pair, frequency in enumerate(rotary.frequencies.double().tolist()):
            angles = [frequency * position for position in at[batch, 0].tolist()]
            mean_cosine = rotary.scaling * sum(map(math.cos, angles)) / TOKENS
            mean_sine = rotary.scaling * sum(map(math.sin, angles)) / TOKENS
            tolerance = 1e-5 + 1e-7 * start  # float32 angles
            assert abs(float(cosine[batch, 0, pair]) - mean_cosine) < tolerance
            assert abs(float(sine[batch, 0, pair]) - mean_sine) < tolerance


def test_turn_by_the_mean_rotation_is_the_mean_of_the_rotations():
    x, at = keys()[0, 0, 0], torch.arange(100, 120)
    mean = torch.stack([ROTARY.rotate(x[None], position[None])[0] for position in at]).mean(0)
    torch.testing.assert_close(turn(x, *ROTARY.mean_rotation(at)), mean, rtol=1e-4, atol=1e-5)
