"""What is taken from a model: its rotary embedding and its attention."""

import sys

import pytest
import torch
from support import FAMILIES, SHAPE, left_padded, tiny, tokens
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DiffLlamaConfig,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    SmolLM3Config,
    StableLmConfig,
)

from kvcomp import KV, CompressedCache, Observed, ops
from kvcomp.attention import ROTARY_FAMILIES, folded_decode, rotary_of
from kvcomp.evict import ExpectedAttention, Random

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


MORE = {"gemma": GemmaConfig, "gemma2": Gemma2Config, "mixtral": MixtralConfig, "olmo2": Olmo2Config}


def build(name):
    if name in SCALED:
        return scaled(name)
    return AutoModelForCausalLM.from_config(MORE[name](**SHAPE)) if name in MORE else tiny(name)


def test_every_family_that_is_said_to_be_known_is_tested():
    tested = {build(name).get_decoder().config.model_type for name in (*FAMILIES, *MORE)}
    assert tested == ROTARY_FAMILIES


@pytest.mark.parametrize("model", [*FAMILIES, *MORE, *SCALED])
def test_rotary_embedding_of_every_family(model):
    model = build(model)
    x = normal(1, 2, 4, 16)
    rotary = rotary_of(model, "full_attention")
    torch.testing.assert_close(rotary.rotate(x, POSITIONS[:, None]), embed(model, x, POSITIONS), rtol=1e-5, atol=1e-5)
    back = rotary.unrotate(embed(model, x, POSITIONS), POSITIONS[:, None])
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CohereConfig, SmolLM3Config])
def test_an_embedding_that_is_not_known_is_not_guessed(config):
    """Cohere turns neighbouring channels, SmolLM3 leaves every fourth layer as it is."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = AutoModelForCausalLM.from_config(config(**shape, vocab_size=97, pad_token_id=None)).eval()
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


def test_models_whose_layers_are_not_given_positions_have_true_ones_too():
    """StableLM does not hand position ids to the cache."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = StableLmConfig(**shape, num_key_value_heads=2, vocab_size=97, pad_token_id=None, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = left_padded([40, 33])
    method, kept = Random(24, sinks=2, recent=4), []
    for text, shown in ((ids, mask), (ids[1:, 7:], mask[1:, 7:])):
        cache = CompressedCache(model, method, interval=8)
        model(text, attention_mask=shown, position_ids=(shown.cumsum(-1) - 1).clamp_min(0), cache=cache)
        kept.append(cache.compressed[0].positions[-1])
    assert torch.equal(*kept)


def test_a_model_that_attends_twice_to_one_update_is_refused():
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**shape, vocab_size=97)).eval()
    with pytest.raises(NotImplementedError, match="attends twice"):
        model(tokens(1, 40), cache=CompressedCache(model, Random(24, sinks=2, recent=4), interval=8))


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_padding_in_a_mask_of_four_axes_is_recognised(hidden):
    model, (ids, mask) = tiny(attention="eager"), left_padded([40, 23])
    causal = torch.ones(40, 40, dtype=torch.bool).tril() & mask[:, None, None].bool()
    causal[1, 0, :17, 0] = True  # no query may be left without a row
    additive = torch.zeros(causal.shape).masked_fill(~causal, hidden)
    cache = CompressedCache(model, Random(24, sinks=2, recent=4), interval=8)
    model(ids, attention_mask=additive, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), cache=cache)
    assert (cache.compressed[0].positions == -1).sum(-1).tolist() == [[0, 0], [1, 1]]


def test_half_precision_scores_do_not_overflow_where_the_model_does_not():
    keys, queries = (torch.full((1, 1, count, 128), 30.0, dtype=torch.float16) for count in (20, 4))
    logits = ops.attention_logits(KV.of(keys, keys), Observed(queries))
    assert logits[..., 0].isfinite().all()  # 128 * 900 is beyond float16, divided by sqrt(128) it is not
