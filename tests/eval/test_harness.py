"""The model of lm-evaluation-harness; all of it is local, and a use of the network fails the test."""

import inspect
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import VOCABULARY, run_python, tiny, tokens

pytest.importorskip("lm_eval", reason="pip install 'kvcomp[eval]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvcomp import CompressedCache
from kvcomp.eval.harness import CompressedLM
from kvcomp.methods import build_method

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{index}" for index in range(3, VOCABULARY))]
STOP = "w7 "
GENERATE = """
task: kv_generate
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["w7 "], max_gen_toks: 30, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
task: kv_choose
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 1
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
SMALL = {"method": "snapkv", "budget": 24, "interval": 8, "set_window": 4, "set_recent": 4}
VARIANTS = {
    "snapkv": SMALL,
    "vase": {"budget": 24, "interval": 8, "seed": 3, "set_recent": 4, "set_window": 4, "set_sinks": 2},
    "h2o": {"method": "h2o", "budget": 24, "interval": 8},
    "tova": {"method": "tova", "budget": 16, "interval": 3},
    "quantized": {"method": "full", "interval": 8, "quantize": "int4 g16 recent=8 sinks=2"},
    "both": SMALL | {"quantize": "int4 g16 recent=8 sinks=2"},
    "protected": SMALL | {"budget": 64, "protect_prompt": True},
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    used = []

    def refuse(*args, **kwargs):
        used.append(args)
        raise OSError("no network in this test")

    for place in ("datasets.config", "huggingface_hub.constants"):  # both have read HF_HUB_OFFLINE already
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not used


def network(settings=None):
    """In float64, as a rounding may decide between two rows that score almost the same; quantizers take float32."""
    return tiny(dtype=torch.float32 if "quantize" in (settings or {}) else torch.float64)


def words(*shape, seed):
    return [" ".join(WORDS[max(int(token), 3)] for token in row) for row in tokens(*shape, seed=seed)]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """The model, two tasks and their data."""
    folder = tmp_path_factory.mktemp("harness")
    network().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "tasks").mkdir()
    docs = [
        {"question": question, "answer": "w5", "choices": words(3, 4 + seed, seed=seed + 50)}
        for seed, length in enumerate((40, 12, 40, 31))
        for question in words(1, length, seed=seed)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        where = f"dataset_path: json\ndataset_kwargs: {json.dumps(source)}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(text.lstrip() + where)
    return folder


def evaluate(folder, batch, model="kvcomp", **settings):
    """Results and, by task, the answers in the order of the documents."""
    settings |= {"dtype": "float32"} if "quantize" in settings else {}
    found = lm_eval.simple_evaluate(
        model, {"pretrained": str(folder / "model"), **settings}, ["kv_generate", "kv_choose"],
        batch_size=batch, device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
    )  # fmt: skip
    answers = {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }
    return found["results"], answers


def assert_close(found, expected):
    assert found["kv_generate"] == expected["kv_generate"]
    for one, other in zip(found["kv_choose"], expected["kv_choose"], strict=True):
        assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
        assert [value for value, _ in one] == pytest.approx([value for value, _ in other], rel=1e-5)


def build(tokenizer, batch_size=1, **settings):
    return CompressedLM(network(settings), tokenizer=tokenizer, device="cpu", batch_size=batch_size, **settings)


def requests(kind, *arguments):
    return [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]


def pairs(seed, *shapes):
    return [
        (words(1, context, seed=seed + i)[0], " " + words(1, rest, seed=99 - i)[0])
        for i, (context, rest) in enumerate(shapes)
    ]


def cache_of(model, settings):
    settings = {"method": "vase-attnv", "budget": 1024, "seed": 0} | settings
    given = [f"{name[4:]}={value}" for name, value in settings.items() if name.startswith("set_")]
    protect, quantize = settings.get("protect_prompt", False), settings.get("quantize")
    compressor = build_method(settings["method"], settings["budget"], protect, given, quantize)
    return CompressedCache(model, compressor, settings["interval"], settings["seed"])


def by_hand(ids, prompt, scored, settings):
    """Sum of the log-probabilities of the last `scored` tokens, greedy or not, rounds: token by token after the
    prompt."""
    model = network(settings)
    cache, logits = cache_of(model, settings), []
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, len(ids) - 1))]:
        logits.append(model(torch.tensor([ids[start:stop]]), cache=cache).logits[0])
    chosen, targets = torch.cat(logits)[-scored:].log_softmax(-1), torch.tensor(ids[-scored:])
    value = float(chosen.gather(-1, targets[:, None]).sum())
    return value, bool((chosen.argmax(-1) == targets).all()), cache.compressed[0].count.round


@pytest.mark.parametrize("settings", [{"method": "full"}, {"method": "snapkv", "budget": 512}], ids=["full", "roomy"])
def test_without_an_eviction_all_is_as_in_the_harness_itself(folder, settings):
    expected = evaluate(folder, 3, "hf")
    found = evaluate(folder, 3, **settings)
    assert_close(found[1], expected[1])
    assert found[0] == expected[0]


@pytest.mark.parametrize("settings", [SMALL, VARIANTS["both"]], ids=["snapkv", "both"])
def test_batches_change_nothing_and_compression_does(folder, settings):
    one, three = evaluate(folder, 1, **settings), evaluate(folder, 3, **settings)
    assert_close(three[1], one[1])
    assert one[0] == three[0]
    full = evaluate(folder, 3, method="full")[1]
    assert one[1]["kv_generate"] != full["kv_generate"]
    assert one[1]["kv_choose"] != full["kv_choose"]


def test_generated_text_is_that_of_generate_with_a_cache(folder, tokenizer):
    answers = evaluate(folder, 3, **SMALL)[1]["kv_generate"]
    docs = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()]
    stopped = 0
    for doc, answer in zip(docs, answers, strict=True):
        model = network()
        ids = tokenizer(doc["question"], return_tensors="pt").input_ids
        output = model.generate(ids, cache=cache_of(model, SMALL), max_new_tokens=30, do_sample=False)
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        stopped += STOP in text
        assert answer == [text.split("<eos>")[0].split(STOP)[0]]
    assert 0 < stopped < len(docs)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_loglikelihood_is_that_of_a_loop_over_the_cache(tokenizer, settings):
    asked = pairs(1, (40, 40), (40, 61), (33, 1), (10, 70), (40, 2))
    found = build(tokenizer, 3, **settings).loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
    rounds = 0
    for (context, rest), (value, greedy) in zip(asked, found, strict=True):
        ids, prompt = tokenizer(context + rest).input_ids, len(context.split())
        expected, expected_greedy, rounds_here = by_hand(ids, prompt, len(ids) - prompt, settings)
        assert value == pytest.approx(expected, rel=1e-5)
        assert greedy == expected_greedy
        rounds = max(rounds, rounds_here)
    assert rounds > 3


def test_a_greedy_continuation_is_called_greedy(tokenizer):
    model = network()
    ids = tokens(1, 40, seed=8).clamp_min(3)
    output = model.generate(ids, cache=cache_of(model, SMALL), max_new_tokens=30, do_sample=False)[0].tolist()
    assert min(output) > 2  # else a token is special to the tokenizer
    context, rest = (" ".join(WORDS[token] for token in part) for part in (output[:40], output[40:]))
    lm = build(tokenizer, **SMALL)
    for wanted, text in ((True, rest), (False, rest[: rest.rindex(" ")] + " w3")):
        assert lm.loglikelihood(requests("loglikelihood", (context, " " + text)))[0][1] is wanted


@pytest.mark.parametrize("name", ["snapkv", "vase", "h2o", "quantized"])
def test_rolling_decodes_all_but_the_first_budget_tokens(tokenizer, name):
    settings = VARIANTS[name]
    texts = words(1, 90, seed=3) + words(1, 20, seed=4)
    expected = []
    for text in texts:
        ids = [1, *tokenizer(text).input_ids]
        prompt = 8 if name == "quantized" else settings["budget"]  # 8: what a quantizer leaves recent
        expected.append(by_hand(ids, min(prompt, len(ids) - 1), len(ids) - 1, settings)[0])
    for batch in (1, 2):
        lm = build(tokenizer, batch, **settings)
        found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in texts)))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [{"method": "full"}, {"method": "snapkv", "budget": 512}], ids=["full", "roomy"])
def test_long_texts_are_cut_as_in_the_harness_itself(tokenizer, settings):
    """Windows of 32 tokens, the last of them with a longer context; a context that does not fit."""
    own = HFLM(network(), tokenizer=tokenizer, device="cpu", batch_size=2, max_length=32)
    lm = build(tokenizer, 2, max_length=32, **settings)
    rolling = requests("loglikelihood_rolling", *((text,) for text in words(2, 75, seed=3)))
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(own.loglikelihood_rolling(rolling), rel=1e-5)
    asked = requests("loglikelihood", *pairs(1, (40, 9), (12, 9), (12, 1)), ("", "w5 w6"))
    for one, other in zip(lm.loglikelihood(asked), own.loglikelihood(asked), strict=True):
        assert one == (pytest.approx(other[0], rel=1e-5), other[1])


def test_one_token_is_scored_by_the_compressed_cache_on_demand(tokenizer, caplog):
    asked = requests("loglikelihood", *pairs(1, (60, 1)))
    full, plain, decoded = (
        build(tokenizer, **settings).loglikelihood(asked)[0][0]
        for settings in ({"method": "full"}, SMALL, SMALL | {"decoded_context": 5})
    )
    assert plain == pytest.approx(full, rel=1e-5)
    assert "1 of 1 continuations have one token" in caplog.text
    ids = tokenizer("".join(asked[0].args)).input_ids
    assert decoded == pytest.approx(by_hand(ids, 55, 1, SMALL)[0], rel=1e-5)
    assert abs(decoded - full) > 1e-3


def test_padded_batches_are_one_generate_call(tokenizer):
    questions = words(1, 40, seed=1) + words(1, 31, seed=2)
    lm = build(tokenizer, 2, padded_batches=True, **SMALL)
    settings = {"until": [], "max_gen_toks": 30, "do_sample": False}
    found = lm.generate_until(requests("generate_until", *((question, settings) for question in questions)))
    model = network()
    given = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        given.input_ids, attention_mask=given.attention_mask, cache=cache_of(model, SMALL), max_new_tokens=30,
        do_sample=False, stop_strings=None,
    )  # fmt: skip
    texts = tokenizer.batch_decode(output[:, given.input_ids.shape[1] :], skip_special_tokens=False)
    assert [answer.split() for answer in found] == [
        text.split("<eos>")[0].replace("<pad>", "").replace("<bos>", "").split() for text in texts
    ]


@pytest.mark.parametrize(("settings", "message"), [
    ({"method": "snapvk"}, "there is no method 'snapvk'"),
    ({"method": "snapkv", "set_pool": 4}, "pool must be odd, got 4"),
    ({"method": "snapkv", "set_wndow": 4}, "does not take the settings"),
    ({"method": "snapkv", "window": 4}, "write set_window=4"),
    ({"method": "full", "protect_prompt": True}, "full evicts nothing"),
    ({"quantize": "int99"}, "int99"),
    ({"quantize": "none"}, "none"),
    ({"buget": 64}, "did you mean 'budget'"),
    ({"protect_promt": True}, "did you mean 'protect_prompt'"),
    ({"interval": 0}, "interval must be an int of at least 1, got 0"),
    ({"seed": True}, "seed must be an int, got True"),
    ({"decoded_context": -1}, "decoded_context must be an int of at least 0"),
    ({"batch_size": "auto"}, "give a number"),
    ({"batch_size": "auto:4"}, "give a number"),
], ids=str)  # fmt: skip
def test_wrong_arguments_are_refused_before_a_model_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        CompressedLM("/no/such/model", device="cpu", **settings)


def test_automatic_batches_of_the_full_cache_are_the_harness_s_own(tokenizer):
    lm = build(tokenizer, "auto", method="full", max_length=64, max_batch_size=2)
    value = lm.loglikelihood(requests("loglikelihood", *pairs(1, (20, 3))))[0][0]
    assert math.isfinite(value)


def test_requests_that_cannot_be_measured_are_refused(tokenizer):
    protected = build(tokenizer, **VARIANTS["protected"])
    with pytest.raises(ValueError, match="protect_prompt=True"):
        protected.loglikelihood_rolling(requests("loglikelihood_rolling", (words(1, 90, seed=3)[0],)))
    with pytest.raises(ValueError, match="a continuation of 9 tokens: .* max_length=8"):
        build(tokenizer, max_length=8, **SMALL).loglikelihood(requests("loglikelihood", *pairs(1, (5, 9))))


def test_the_command_gives_what_python_gives(folder):
    """In a process of its own, with values as the harness reads them from a command line."""
    arguments = ",".join(f"{name}={value}" for name, value in (VARIANTS["both"] | {"dtype": "float32"}).items())
    command = [
        sys.executable, "-m", "kvcomp.eval.harness", "--model", "kvcomp", "--tasks", "kv_generate,kv_choose",
        "--model_args", f"pretrained={folder / 'model'},{arguments}", "--include_path", str(folder / "tasks"),
        "--batch_size", "2", "--device", "cpu", "--output_path", str(folder / "out"), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment = os.environ | offline | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "kv_choose" in done.stdout
    results, answers = evaluate(folder, 3, **VARIANTS["both"])
    written = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]
    assert written["kv_choose"]["acc,none"] == results["kv_choose"]["acc,none"]
    lines = next((folder / "out").rglob("samples_kv_generate_*.jsonl")).read_text().splitlines()
    samples = sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])
    assert [sample["filtered_resps"] for sample in samples] == answers["kv_generate"]


def test_lm_eval_is_needed_by_this_module_only_and_types_are_checked():
    """In a process where nothing is loaded yet, and no checks of types but its own."""
    run_python(
        inspect.cleandoc("""
        import sys
        import kvcomp, kvcomp.eval, kvcomp.cli
        assert "lm_eval" not in sys.modules
        sys.modules["lm_eval"] = None
        try:
            import kvcomp.eval.harness
        except ValueError as error:
            assert str(error) == "lm_eval is not installed: pip install 'kvcomp[eval]'", error
        else:
            raise AssertionError
        del sys.modules["lm_eval"]
        from kvcomp.eval.harness import CompressedLM
        for settings, message in (
            ({"budget": "many"}, "budget must be an int of at least 1, got 'many'"),
            ({"budget": 64.5}, "budget must be an int of at least 1, got 64.5"),
            ({"protect_prompt": "maybe"}, "protect_prompt must be a bool, got 'maybe'"),
            ({"padded_batches": "maybe"}, "padded_batches must be True or False, got 'maybe'"),
            ({"quantize": 8}, "'8'"),
        ):
            try:
                CompressedLM("/no/such/model", device="cpu", **settings)
            except ValueError as error:
                assert message in str(error), error
            else:
                raise AssertionError(settings)
    """)
    )
