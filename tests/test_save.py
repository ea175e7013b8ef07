"""A saved cache goes on exactly where it stopped; anything else is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny, tokens

from kvcomp import CompressedCache
from kvcomp.evict import H2O, METHODS, KeyNorm, Random, Replay, VaSE
from kvcomp.save import from_settings, to_settings

SMALL = VaSE(24, sinks=2, recent=4, window=4, protected=6)
REPLAY = Replay(24, sinks=2, recent=4, window=4, remembers=20)


def filled(model, compressor=SMALL, prompt=40, steps=11, seed=5):
    cache = CompressedCache(model, compressor, interval=8, seed=seed)
    model(tokens(2, prompt), cache=cache)
    for step in range(steps):
        model(tokens(2, 1, seed=step), cache=cache)
    return cache


@pytest.mark.parametrize("compressor", [SMALL, REPLAY, H2O(24) | KeyNorm(20, sinks=2, recent=4), Random(100)], ids=repr)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_loaded_cache_goes_on_bit_for_bit(tmp_path, family, compressor):
    model, path = tiny(family), tmp_path / "cache.safetensors"
    cache = filled(model, compressor)
    cache.save(path)
    other = CompressedCache.load(path, tiny(family))
    assert other.compressor == compressor and other.seed == 5 and other.interval == 8
    assert other.get_seq_length() == 51
    for step in range(30):
        token = tokens(2, 1, seed=100 + step)
        assert torch.equal(model(token, cache=cache).logits, model(token, cache=other).logits)
    for one, loaded in zip(cache.compressed, other.compressed, strict=True):
        assert torch.equal(one.positions, loaded.positions) and one.count == loaded.count
        assert one.storage.capacity == loaded.storage.capacity


def test_the_file_holds_true_positions_and_only_rows_in_use(tmp_path):
    cache, path = filled(tiny()), tmp_path / "cache.safetensors"
    cache.save(path)
    tensors = load_file(path)
    assert torch.equal(tensors["1.positions"], cache.compressed[1].positions)
    assert tensors["0.keys"].shape == (2, 2, cache.compressed[0].storage.rows, 16)


def test_drafts_can_be_rolled_back_after_loading(tmp_path):
    model, path = tiny(), tmp_path / "cache.safetensors"
    cache = filled(model)
    cache.activate_past_recording()
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    for each in (cache, loaded):
        model(tokens(2, 15), cache=each)
        each.crop(-9)
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(cache.compressed, loaded.compressed, strict=True))


def test_an_empty_cache_can_be_saved(tmp_path):
    model, path = tiny(), tmp_path / "cache.safetensors"
    CompressedCache(model, SMALL).save(path)
    assert CompressedCache.load(path, model).get_seq_length() == 0


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_every_method_survive(name):
    for compressor in (METHODS[name](budget=512, protect_prompt=True), METHODS[name](budget=512) | Random(400)):
        assert from_settings(json.loads(json.dumps(to_settings(compressor)))) == compressor


def test_files_that_do_not_fit_are_refused(tmp_path):
    model, path = tiny(), tmp_path / "cache.safetensors"
    filled(model).save(path)
    with pytest.raises(ValueError, match="num_hidden_layers.*3"):
        CompressedCache.load(path, tiny(layers=3))
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        CompressedCache.load(path, tiny(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="pass the same settings"):
        CompressedCache.load(path, model, Random(100))
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        CompressedCache.load(torn, model)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(1)}, foreign)
    with pytest.raises(ValueError, match="no saved CompressedCache"):
        CompressedCache.load(foreign, model)
    save_file({"x": torch.zeros(1)}, foreign, metadata={"kvcomp": json.dumps({"format": 99})})
    with pytest.raises(ValueError, match="format 99.*reads format 2"):
        CompressedCache.load(foreign, model)
    with pytest.raises(FileNotFoundError):
        CompressedCache.load(tmp_path / "nothing", model)


def test_a_method_of_ones_own_is_passed_again(tmp_path):
    class VATP(Random):  # the name of one of kvcomp's, but another class
        pass

    model, path, mine = tiny(), tmp_path / "cache.safetensors", VATP(24, sinks=2, recent=4)
    filled(model, mine).save(path)
    with pytest.raises(ValueError, match="VATP' is no method of kvcomp: pass the compressor"):
        CompressedCache.load(path, model)
    assert CompressedCache.load(path, model, mine).get_seq_length() == 51


def test_a_failed_save_leaves_the_older_file(tmp_path, monkeypatch):
    model, path = tiny(), tmp_path / "cache.safetensors"
    cache = filled(model)
    cache.save(path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("kvcomp.save.save_file", full)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    assert path.read_bytes() == before
