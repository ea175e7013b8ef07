import pytest
import torch
from support import generate, tiny, tokens
from transformers import DynamicCache

from kvcomp import CompressedCache
from kvcomp.eval.decode import LOOP, Decoding, decode, loops, pick
from kvcomp.evict import Random, SnapKV

NAMES = ["a/0", "b/0", "c/0", "d/0"]
EVICTING = SnapKV(24, recent=8, window=8)


def run(how, ids, names=NAMES, ends=frozenset(), model=None):
    found = {one.row: one for one in decode(model or tiny(), ids, names, set(ends), how)}
    assert sorted(found) == list(range(len(ids)))
    return [found[row] for row in range(len(ids))]


@pytest.mark.parametrize("compressor", [None, EVICTING], ids=["full", "snapkv"])
def test_greedy_tokens_are_those_of_generate(compressor):
    model, ids = tiny(), tokens(4, 40)
    cache = DynamicCache(config=model.config) if compressor is None else CompressedCache(model, compressor, 8, 0)
    expected = generate(model, ids, new=60, cache=cache)[:, 40:]
    found = run(Decoding(compressor, interval=8, max_new_tokens=60), ids, model=model)
    assert [one.tokens for one in found] == expected.tolist()
    assert not any(one.finished for one in found)


@pytest.mark.parametrize("how", [
    Decoding(None, 8, 80),
    Decoding(EVICTING, 8, 80),
    Decoding(Random(24, recent=8), 8, 80, temperature=1.0, top_p=0.9, seed=3),
], ids=["full", "greedy", "drawn"])  # fmt: skip
def test_rows_that_leave_do_not_change_the_others(how):
    """Every row equals itself alone, though rows end at different times."""
    ids = tokens(4, 40)
    alone = [run(how, ids[row : row + 1], NAMES[row : row + 1])[0].tokens for row in range(4)]
    ends = {alone[0][5], alone[2][30]}

    def cut(text):
        stop = next((index for index, token in enumerate(text) if token in ends), None)
        return (text[:stop], True) if stop is not None else (text, False)

    found = run(how, ids, ends=ends)
    assert [(one.tokens, one.finished) for one in found] == [cut(text) for text in alone]
    assert len({len(one.tokens) for one in found}) > 1


def test_bytes_are_those_of_the_row_alone():
    ids = tokens(4, 40)
    for how in (Decoding(None, 8, 20), Decoding(EVICTING, 8, 20)):
        together, alone = run(how, ids)[1].kv_bytes, run(how, ids[1:2], NAMES[1:2])[0].kv_bytes
        assert together == alone > 0


def test_a_drawn_token_comes_as_often_as_its_probability():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)
    keys = torch.arange(20_000)
    share = pick(logits, keys, 0, Decoding(temperature=1.0)).bincount(minlength=4) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.01, rtol=0)
    share = pick(logits, keys, 0, Decoding(temperature=1.0, top_p=0.7)).bincount(minlength=4) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.01, rtol=0)
    cold = pick(logits, keys, 0, Decoding(temperature=0.5)).bincount(minlength=4) / 20_000
    squares = torch.tensor([0.5, 0.3, 0.15, 0.05]).square()
    torch.testing.assert_close(cold, squares / squares.sum(), atol=0.01, rtol=0)


def test_draws_differ_by_row_step_and_seed_and_leave_torch_alone():
    logits, keys = torch.zeros(2000, 50), torch.arange(2000)
    before = torch.get_rng_state()
    draws = [pick(logits, keys, step, Decoding(temperature=1.0, seed=seed)) for step, seed in ((0, 0), (1, 0), (0, 1))]
    assert torch.equal(before, torch.get_rng_state())
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (draws[one] == draws[other]).float().mean() < 0.05
    assert torch.equal(draws[0], pick(logits, keys, 0, Decoding(temperature=1.0)))


@pytest.mark.parametrize(("text", "answer"), [
    ([7] * LOOP, True),
    ([7] * (LOOP - 1), False),
    ([1, 2, 3] * 16, True),
    ([*range(100), *([4, 5] * 24)], True),
    ([*([4, 5] * 40), 9], False),
    (list(range(40)) * 3, True),
    ([*range(41), *(list(range(40)) * 2)], False),
    (list(range(500)), False),
    ([], False),
])  # fmt: skip
def test_a_loop_is_a_repeated_end(text, answer):
    assert loops(text) is answer


@pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Decoding(**settings)
