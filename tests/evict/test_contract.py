"""What holds for every method in `METHODS`."""

import dataclasses
import random
import re
from dataclasses import replace

import numpy
import pytest
import torch

from kvcomp.core import KV, PAD, Compressor, Observed
from kvcomp.evict import METHODS, ScoreEvictor, VaSE
from kvcomp.rotary import Rotary

ROWS, QUERIES, SINKS, RECENT, BUDGET = 40, 12, 2, 4, 16
SMALL = {"budget": BUDGET, "sinks": SINKS, "recent": RECENT, "window": 4, "future": 16, "skip": 1}
OWN = {"vase-attnv": {"protected": 6}, "vase-dkv": {"rank": 4}, "curdkv": {"rank": 4}}
LEAST = {
    "budget": 1, "sinks": 0, "recent": 0, "window": 1, "pool": 1, "rank": 1, "local_window": 1, "future": 1, "skip": 0,
    "protected": 0, "remembers": 0, "ahead": 0,
}  # fmt: skip
DRAWS = {  # what the random numbers of a method depend on, besides head and position
    "vase-attnv": {"seed", "layer", "round"},
    "vase-dkv": {"seed", "layer", "round"},
    "curdkv": {"seed", "layer"},  # one sketch for the whole generation
    "random": {"seed", "layer", "round"},
}
USES = {
    "vase-attnv": {"keys", "values", "queries"}, "vase-dkv": {"keys", "values"}, "snapkv": {"keys", "queries"},
    "rkv": {"keys", "queries"}, "rkv-simplified": {"keys", "queries"}, "curdkv": {"keys", "values"}, "h2o": {"mass"},
    "streaming-llm": set(), "tova": {"keys", "queries"}, "keydiff": {"keys"}, "key-norm": {"keys"},
    "vatp": {"values", "mass"}, "expected-attention": {"keys", "values", "queries"}, "random": set(),
    "replay": {"keys", "queries"},
}  # fmt: skip
READS = [(name, tensor) for name, tensors in USES.items() for tensor in sorted(tensors)]
each_method = pytest.mark.parametrize("name", METHODS)


def settable(method):
    return [field.name for field in dataclasses.fields(method) if field.init]


def small(name, **settings):
    """The method with budget 16, 2 sinks, 4 recent rows and a window of 4, as far as it has them."""
    method = METHODS[name](1000)
    given = SMALL | OWN.get(name, {}) | settings
    return replace(method, **{field: value for field, value in given.items() if field in settable(method)})


def example(batch=2, query_heads=4, kv_heads=2, pads=(), dtype=torch.float32, seed=0, channels=8):
    """40 rows and 12 queries; `pads[b]` rows of padding at the start of batch row `b`."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    pads = torch.tensor([*pads, *[0] * (batch - len(pads))])
    positions = (torch.arange(ROWS) - pads[:, None]).clamp_min(PAD).to(torch.int32)
    kv = KV(
        normal(batch, kv_heads, ROWS, channels), normal(batch, kv_heads, ROWS, channels),
        positions[:, None].repeat(1, kv_heads, 1), torch.rand(batch, kv_heads, ROWS, generator=generator),
    )  # fmt: skip
    seen = Observed(
        2.0 * normal(batch, query_heads, QUERIES, channels), positions[:, -QUERIES:], layer=3, round=5, seed=7,
        prompt_end=10 - pads.clamp_max(5), padded=bool(pads.any()), rotary=Rotary(100.0 ** -(torch.arange(4) / 4)),
    )  # fmt: skip
    return kv, seen


def on_kv(kv, change):
    return KV(change(kv.keys), change(kv.values), change(kv.positions), change(kv.mass))


def on_seen(seen, change):
    return replace(
        seen, queries=change(seen.queries), query_positions=change(seen.query_positions),
        prompt_end=change(seen.prompt_end),
    )  # fmt: skip


def tensors(kv, seen):
    return [kv.keys, kv.values, kv.positions, kv.mass, seen.queries, seen.query_positions, seen.prompt_end]


def kept_sets(kept):
    return [[set(head) for head in row] for row in kept.tolist()]


@each_method
def test_method_is_a_frozen_dataclass_that_compares_by_its_settings(name):
    method = small(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.budget = 20
    assert method == small(name)
    assert hash(method) == hash(small(name))
    assert method != small(name, budget=20)


@each_method
def test_method_is_a_compressor_and_composes(name):
    assert isinstance(small(name), Compressor)
    assert (small(name, budget=20) | small(name)).budget == BUDGET


@each_method
def test_compress_returns_budget_rows_in_time_order(name):
    kv, seen = example()
    result = small(name).compress(kv, seen)
    assert result.rows == BUDGET
    assert bool((result.positions.diff(dim=-1) > 0).all())
    for batch in range(2):
        for head in range(2):
            rows = result.positions[batch, head].long()  # position = index here
            assert torch.equal(result.keys[batch, head], kv.keys[batch, head, rows])
            assert torch.equal(result.values[batch, head], kv.values[batch, head, rows])
            assert torch.equal(result.mass[batch, head], kv.mass[batch, head, rows])


@each_method
def test_inputs_stay_unchanged(name):
    kv, seen = example(pads=(5,))
    before = [tensor.clone() for tensor in tensors(kv, seen)]
    result = small(name, protect_prompt=True).compress(kv, seen)
    result.keys.zero_(), result.values.zero_(), result.positions.zero_(), result.mass.zero_()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors(kv, seen), before, strict=True))


@each_method
def test_sinks_and_recent_rows_stay(name):
    kept = small(name).select(*example(pads=(5,)))
    recent = set(range(ROWS - RECENT, ROWS))
    assert all(head >= {5, 6} | recent for head in kept_sets(kept)[0])
    assert all(head >= {0, 1} | recent for head in kept_sets(kept)[1])


@each_method
def test_protected_prompt_stays(name):
    kv, seen = example(pads=(5,))  # the prompts end at positions 5 and 10, both in row 10
    kept = small(name, budget=20, protect_prompt=True).select(kv, seen)
    recent = set(range(ROWS - RECENT, ROWS))
    assert all(head >= {*range(5, 10)} | recent for head in kept_sets(kept)[0])
    assert all(head >= {*range(10)} | recent for head in kept_sets(kept)[1])


@each_method
def test_prompt_that_does_not_fit_raises_with_both_numbers(name):
    kv, seen = example()
    method = small(name, protect_prompt=True)
    too_long = replace(seen, prompt_end=torch.tensor([10, 13]))
    with pytest.raises(ValueError, match=rf"keep 17 rows .*budget={BUDGET}\b"):
        method.compress(kv, too_long)
    with pytest.raises(ValueError, match=rf"keep 17 rows .*budget={BUDGET}\b"):
        method.check_prompt(13)
    method.check_prompt(12)
    small(name).check_prompt(13)
    assert small(name).compress(kv, too_long).rows == BUDGET


@pytest.mark.parametrize("budget", [ROWS, ROWS + 1])
@each_method
def test_budget_that_holds_all_rows_changes_nothing(name, budget):
    kv, seen = example(pads=(5,))
    result = small(name, budget=budget).compress(kv, seen)
    for field in ("keys", "values", "positions", "mass"):
        assert torch.equal(getattr(result, field), getattr(kv, field))


@pytest.mark.parametrize("protect_prompt", [False, True])
@pytest.mark.parametrize("pads", [5, ROWS - BUDGET - 1, ROWS - BUDGET, ROWS - BUDGET + 1, ROWS - 3, ROWS - 1])
@each_method
def test_padding_leaves_first(name, pads, protect_prompt):
    kv, seen = example(pads=(0, pads))
    result = small(name, budget=BUDGET, protect_prompt=protect_prompt).compress(kv, seen)
    assert not result.pads[0].any()
    assert result.pads[1].sum(-1).tolist() == [max(BUDGET - (ROWS - pads), 0)] * 2


@pytest.mark.parametrize("name", [name for name in METHODS if name != "random"])
def test_exact_ties_go_to_the_newer_token(name):
    axis = torch.zeros(1, 1, 1, 8).index_fill_(3, torch.tensor(0), 1.0)  # products with it are exact
    kv, seen = example()
    kv = KV(axis.expand(2, 2, ROWS, 8), axis.expand(2, 2, ROWS, 8), kv.positions, torch.ones(2, 2, ROWS))
    seen = replace(seen, queries=axis.expand(2, 4, QUERIES, 8))
    method = small(name, pool=1)  # a wider pool gives less to the rows at the ends
    if isinstance(method, VaSE) and method.scorer == "attnv":
        method = replace(method, stochastic=False)
    expected = [*range(SINKS), *range(ROWS - BUDGET + SINKS, ROWS)]
    assert method.select(kv, seen).tolist() == [[expected] * 2] * 2


class Given(ScoreEvictor):
    """Scores that are given as the mass."""

    def score(self, kv, seen):
        return kv.mass


def test_equal_scores_beside_better_and_worse_ones_go_to_the_newer_token():
    kv, seen = example(batch=1, kv_heads=1)
    score = torch.ones(1, 1, ROWS).index_fill_(2, torch.tensor([5, 6]), 2.0).index_fill_(2, torch.tensor([33]), 0.0)
    kept = Given(BUDGET, sinks=SINKS, recent=RECENT).select(replace(kv, mass=score), seen)
    assert kept.flatten().tolist() == [0, 1, 5, 6, 27, 28, 29, 30, 31, 32, 34, 35, 36, 37, 38, 39]


@pytest.mark.parametrize("extreme", [torch.inf, torch.finfo(torch.float32).max])
def test_infinite_scores_neither_displace_pinned_rows_nor_save_padding(extreme):
    kv, seen = example(pads=(5,))
    score = torch.full((2, 2, ROWS), -extreme)
    score[:, :, 3:30] = extreme
    kept = Given(BUDGET, sinks=SINKS, recent=RECENT).select(replace(kv, mass=score), seen)
    expected = [[5, 6, *range(20, 30), *range(36, 40)], [0, 1, *range(20, 30), *range(36, 40)]]
    assert kept.tolist() == [[row] * 2 for row in expected]


@pytest.mark.parametrize(("name", "tensor"), READS)
def test_nan_raises_and_names_the_count(name, tensor):
    kv, seen = example()
    if tensor == "queries":
        seen.queries[1, 2, -1, 4] = torch.nan
    else:
        getattr(kv, tensor)[1, 1, 20] = torch.nan
    with pytest.raises(ValueError, match=rf"\b[1-9]\d* of {2 * 2 * ROWS} scores of layer 3 are NaN"):
        small(name).compress(kv, seen)


def test_nan_of_one_key_is_counted_once():
    kv, seen = example()
    kv.keys[1, 1, 20, 4] = torch.nan
    with pytest.raises(ValueError, match=r"KeyNorm: 1 of 160 scores"):
        small("key-norm").compress(kv, seen)


@each_method
def test_budget_without_a_row_to_choose_raises_with_the_numbers(name):
    always = SINKS + RECENT + (6 if name == "vase-attnv" else 0)  # the sum, although the sinks are protected rows too
    with pytest.raises(ValueError, match=rf"budget={always}\b.*sinks=.* \+ recent=.*at least {always + 1}\b"):
        small(name, budget=always)
    assert small(name, budget=always + 1).budget == always + 1
    assert small(name).reserved == always


SIZES = [(name, field) for name in METHODS for field in LEAST if field in settable(METHODS[name](1000))]
SIZES.remove(("vase-dkv", "window"))  # always 0: it looks at no query


@pytest.mark.parametrize(("name", "field"), SIZES)
def test_size_below_its_least_raises_with_name_and_value(name, field):
    for value in {LEAST[field] - 1, -1}:
        with pytest.raises(ValueError, match=rf"{field} must be at least {LEAST[field]}, got {value}"):
            small(name, **{field: value})
    least = {"budget": 1, "sinks": 0, "recent": 0} | ({"protected": 0} if name == "vase-attnv" else {})
    assert getattr(small(name, **least | {field: LEAST[field]}), field) == LEAST[field]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("vase-attnv", "pool", 4), ("snapkv", "pool", 4), ("rkv", "pool", 4), ("rkv", "pooling", "median"),
        ("rkv", "group", "min"), ("rkv", "weight", -0.1), ("rkv", "weight", 1.1), ("rkv", "weight", float("nan")),
        ("vase-attnv", "scorer", "attn"), ("vase-attnv", "magnitude", "l1"), ("vase-attnv", "temperature", 0.0),
        ("vase-attnv", "temperature", -1.0), ("vase-attnv", "temperature", float("nan")),
    ],
)  # fmt: skip
def test_setting_that_makes_no_sense_raises_and_names_it(name, field, value):
    method = small(name)
    object.__setattr__(method, field, value)  # the type checks of the tests would refuse some before the method does
    with pytest.raises(ValueError, match=field):
        method.__post_init__()


@each_method
def test_repr_shows_the_settings(name):
    method = small(name, protect_prompt=True)
    shown = repr(method)
    for field in settable(method):
        assert re.search(rf"\b{field}={re.escape(repr(getattr(method, field)))}[,)]", shown)
    assert shown.startswith(type(method).__name__)


def test_repr_of_rkv_shows_its_weight():
    assert "weight=0.1," in repr(METHODS["rkv"](512))
    assert "weight=0.5," in repr(METHODS["rkv-simplified"](512))


@each_method
def test_same_seed_keeps_the_same_rows(name):
    kept = small(name).select(*example())
    assert torch.equal(kept, small(name).select(*example()))


@pytest.mark.parametrize("change", ["seed", "layer", "round"])
@each_method
def test_only_stochastic_methods_depend_on_seed_layer_and_round(name, change):
    kv, seen = example()
    other = replace(seen, **{change: getattr(seen, change) + 1})
    kept, kept_other = small(name).select(kv, seen), small(name).select(kv, other)
    same = (kept == kept_other).all(-1)
    assert not same.any() if change in DRAWS.get(name, ()) else same.all()


@pytest.mark.parametrize(
    ("name", "settings"), [("curdkv", {"rank": None}), ("vase-attnv", {"stochastic": False})], ids=str
)
def test_variant_without_noise_depends_on_no_seed(name, settings):
    kv, seen = example()
    method = small(name, **settings)
    assert torch.equal(method.select(kv, seen), method.select(kv, replace(seen, seed=1, layer=1, round=1)))


def test_dkv_that_is_not_stochastic_has_one_sketch_for_all_rounds():
    kv, seen = example()
    method = small("vase-dkv", stochastic=False)
    kept = method.select(kv, seen)
    assert torch.equal(kept, method.select(kv, replace(seen, round=6)))
    assert not torch.equal(kept, method.select(kv, replace(seen, seed=6)))


@each_method
def test_heads_with_equal_rows_draw_for_themselves(name):
    kv, seen = example()
    equal = on_kv(kv, lambda tensor: tensor[:, :1].expand_as(tensor))
    kept = small(name).select(equal, replace(seen, queries=seen.queries[:, :1].expand_as(seen.queries)))
    assert torch.equal(kept[:, 0], kept[:, 1]) != (name in DRAWS)


@each_method
def test_equal_batch_rows_keep_the_same_rows(name):
    kv, seen = example()
    copies = lambda tensor: tensor[:1].expand_as(tensor)  # noqa: E731
    kept = small(name).select(on_kv(kv, copies), on_seen(seen, copies))
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("pads", [(), (0, 9)])
@each_method
def test_kept_rows_do_not_depend_on_the_batch(name, pads):
    kv, seen = example(batch=3, pads=pads)
    other_kv, other_seen = example(batch=3, pads=pads, seed=1)
    for target, source in zip(tensors(other_kv, other_seen), tensors(kv, seen), strict=True):
        target[1] = source[1]
    row = lambda tensor: tensor[1:2]  # noqa: E731
    kept = small(name).select(kv, seen)[1]
    assert torch.equal(small(name).select(on_kv(kv, row), on_seen(seen, row))[0], kept)
    assert torch.equal(small(name).select(other_kv, other_seen)[1], kept)


@each_method
def test_global_generators_stay_untouched(name, monkeypatch):
    torch_state, numpy_state = torch.get_rng_state(), numpy.random.get_state()
    for function in ("random", "uniform", "gauss", "randrange", "randint", "choice", "choices", "sample", "shuffle"):
        # The state cannot be compared: the type checks of the tests draw bits from this generator.
        monkeypatch.setattr(random, function, lambda *args, **kwargs: pytest.fail("drew from Python's generator"))
    small(name).compress(*example())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(numpy.array_equal(new, old) for new, old in zip(numpy.random.get_state(), numpy_state, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 1), (4, 2), (4, 4), (1, 1)])
@each_method
def test_every_dtype_and_grouping_works(name, query_heads, kv_heads, dtype):
    kv, seen = example(query_heads=query_heads, kv_heads=kv_heads, pads=(5,), dtype=dtype)
    result = small(name).compress(kv, seen)
    assert result.keys.shape == result.values.shape == (2, kv_heads, BUDGET, 8)
    assert result.keys.dtype == result.values.dtype == dtype
    assert bool((result.positions.diff(dim=-1) > 0).all()) and not result.pads.any()


@each_method
def test_rows_may_be_a_view_of_larger_storage(name):
    kv, seen = example()
    view = on_kv(kv, lambda tensor: torch.cat([tensor, tensor.flip(2)], dim=2)[:, :, :ROWS])
    assert not view.keys.is_contiguous()
    assert torch.equal(small(name).select(view, seen), small(name).select(kv, seen))


@each_method
def test_older_queries_than_the_window_do_not_matter(name):
    kv, seen = example()
    method = small(name)
    fewer = seen.last(max(method.window, 1))
    assert fewer.queries.shape[2] < QUERIES
    assert torch.equal(method.select(kv, seen), method.select(kv, fewer))


@pytest.mark.parametrize("name", [name for name in METHODS if small(name).window])
def test_missing_queries_raise(name):
    kv, seen = example()
    with pytest.raises(ValueError, match=r"Observed\.queries"):
        small(name).compress(kv, replace(seen, queries=None, query_positions=None))


@pytest.mark.parametrize("name", [name for name in METHODS if not small(name).window])
def test_method_that_wants_no_queries_runs_without_them(name):
    kv, seen = example()
    bare = replace(seen, queries=None, query_positions=None)
    assert torch.equal(small(name).select(kv, bare), small(name).select(kv, seen))


@each_method
def test_mass_is_needed_exactly_by_methods_that_accumulate(name):
    kv, seen = example()
    method = small(name)
    assert method.accumulates == ("mass" in USES[name])
    if method.accumulates:
        with pytest.raises(ValueError, match=r"KV\.mass is None"):
            method.compress(replace(kv, mass=None), seen)
    else:
        assert method.compress(replace(kv, mass=None), seen).mass is None


def test_expected_attention_needs_a_known_rotary_embedding():
    kv, seen = example()
    with pytest.raises(NotImplementedError, match="rotary"):
        small("expected-attention").compress(kv, replace(seen, rotary=None))
