"""What is taken from a model: its rotary embedding and its attention."""

import sys

import pytest
import torch
from support import FAMILIES, tiny, tokens
from transformers import AutoModelForCausalLM, CohereConfig, LlamaConfig

from kvcomp import CompressedCache
from kvcomp.attention import folded_decode, rotary_of
from kvcomp.evict import ExpectedAttention

POSITIONS = torch.tensor([[0, 1, 57, 300]])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def embed(model, x, positions):
    """`x` after the model's own rotary embedding of full attention layers."""
    decoder = model.get_decoder()
    kind = ["full_attention"] if isinstance(decoder.rotary_emb.rope_type, dict) else []
    cosine, sine = decoder.rotary_emb(x, positions, *kind)
    return sys.modules[type(decoder).__module__].apply_rotary_pos_emb(x, x, cosine, sine)[0]


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


def scaled(name):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 97,
    }
    config = LlamaConfig(**shape, max_position_embeddings=2048, rope_parameters=SCALED[name])
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model", [*FAMILIES, *SCALED])
def test_rotary_embedding_of_every_family(model):
    model = scaled(model) if model in SCALED else tiny(model)
    x = normal(1, 2, 4, 16)
    rotary = rotary_of(model, "full_attention")
    torch.testing.assert_close(rotary.rotate(x, POSITIONS[:, None]), embed(model, x, POSITIONS), rtol=1e-5, atol=1e-5)
    back = rotary.unrotate(embed(model, x, POSITIONS), POSITIONS[:, None])
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_an_embedding_that_is_laid_out_otherwise_is_not_guessed():
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 97,
    }
    model = AutoModelForCausalLM.from_config(CohereConfig(**shape))  # turns neighbouring channels
    assert rotary_of(model, "full_attention") is None
    cache = CompressedCache(model, ExpectedAttention(24, recent=4, window=8), interval=8)
    with pytest.raises(NotImplementedError, match="rotary embedding of this model is not known"):
        model(tokens(1, 40), cache=cache)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("masks", [None, 1, "heads"])
def test_folded_decoding_equals_attention_with_repeated_heads(group, masks):
    query, key, value = normal(2, 2 * group, 1, 8), normal(2, 2, 20, 8, seed=1), normal(2, 2, 20, 6, seed=2)
    heads = {None: 0, 1: 1, "heads": 2 * group}[masks]
    mask = (normal(2, heads, 1, 20, seed=3) > -1) if heads else None
    repeated = [tensor.repeat_interleave(group, dim=1) for tensor in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(folded_decode(query, key, value, mask, 0.3), expected.transpose(1, 2))
