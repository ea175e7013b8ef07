"""Models and the compiler with the Triton kernels in place of the definitions."""

import pytest
import torch

from kvcomp import dispatch, ops

from .helpers import DEVICE, assert_same_bits, integers, normal, on_device

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    """On CPU tensors too, for the interpreter."""
    monkeypatch.setitem(dispatch.LIBRARIES, "cpu", dispatch.LIBRARIES["cuda"])
    dispatch._kernels.cache_clear()
    ops.use_kernels(True)
    yield
    dispatch._kernels.cache_clear()


@pytest.fixture
def used(monkeypatch):
    """The names of the kernels that ran; none may leave its case to the definition."""
    names = set()

    def noted(kernel):
        def run(*args, **settings):
            result = kernel(*args, **settings)
            assert result is not NotImplemented, kernel.__name__
            names.add(kernel.__name__)
            return result

        return run

    for module, operations in OPERATIONS.items():
        kernels = dispatch._kernels(DEVICE, module)
        for name in operations:
            monkeypatch.setattr(kernels, name, noted(getattr(kernels, name)))
    return names


OPERATIONS = {
    "pack": ["pack", "unpack", "hadamard", "take_rows"],
    "score": ["window_score", "value_range", "sketched_leverage"],
    "decode": ["packed_decode"],
    "noise": ["token_noise"],
}


def methods():
    """By name, a method and kernels that it must run."""
    from kvcomp.evict import SnapKV, VaSE
    from kvcomp.quant import MixedPrecision

    vase = VaSE(24, window=8, sinks=2, recent=8)
    return {
        "attnv": (vase, {"window_score", "token_noise", "take_rows"}),
        "dkv": (VaSE(24, scorer="dkv", sinks=2, recent=8), {"sketched_leverage", "take_rows"}),
        "SnapKV": (SnapKV(24, window=8, recent=8), {"window_score", "take_rows"}),
        "packed": (vase | MixedPrecision(4, recent=8), {"pack", "packed_decode", "window_score", "unpack"}),
        "rotated": (
            vase | MixedPrecision(8, recent=8, rotate_keys=True, group_size=8),
            {"pack", "packed_decode", "hadamard"},
        ),
    }


@pytest.mark.parametrize(
    "name, lengths",
    [
        ("attnv", [23, 37]),
        ("dkv", [40]),
        ("SnapKV", [23, 37]),
        ("packed", [40]),
        ("packed", [23, 37]),
        ("rotated", [40]),
    ],
)
def test_a_model_says_the_same_with_kernels(name, lengths, used):
    support = pytest.importorskip("support", exc_type=ImportError, reason="this transformers has no CompressedCache")
    from kvcomp import CompressedCache

    method, expected = methods()[name]
    ids, mask = (part.to(DEVICE) for part in support.left_padded(lengths))

    def generated(with_kernels):
        model = support.tiny(layers=1).to(DEVICE)
        ops.use_kernels(with_kernels)
        return support.generate(model, ids, mask, new=12, cache=CompressedCache(model, method, interval=8))

    want = generated(False)
    assert not used
    assert torch.equal(generated(True), want)
    assert expected <= used


def samples():
    """By operation, arguments."""
    x, index = normal(2, 3, 21, 64), integers(-1, 21, (2, 3, 9))
    ops.use_kernels(False)
    parts = ops.pack(x, 4, 32, HALF)
    ops.use_kernels(True)
    positions = torch.arange(21, dtype=torch.int32).repeat(2, 3, 1)
    queries, query_positions = normal(2, 6, 5, 64, seed=1), torch.arange(16, 21).repeat(2, 1)
    dense = [normal(2, 3, 4, 64, seed=seed) for seed in (2, 3, 4, 5)]
    later = [torch.arange(start, start + 4, dtype=torch.int32).repeat(2, 3, 1) for start in (21, 25)]
    query = normal(2, 6, 2, 64, seed=6)
    given = {
        "pack": (x, 4, 32, HALF, True, index),
        "unpack": (*parts, 4, 32, 64, torch.float32),
        "hadamard": (x,),
        "take_rows": (x, index.clamp_min(0)),
        "window_score": (queries, x, x + 1, positions, query_positions, 0.125, 5, 5, 3, True),
        "value_range": (x,),
        "sketched_leverage": (x, x + 1, normal(3, 64, 20, seed=7)),
        "packed_decode": (query, query, list(parts), list(parts), dense, [positions, *later], [4, 4], [32, 32], 0.125),
        "token_noise": (positions, 5, 1, 2),
    }
    return {name: [on_device(arg) for arg in args] for name, args in given.items()}


NAMES = [name for operations in OPERATIONS.values() for name in operations]


CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"]
"""Symbolic sizes are tried in `tests/test_dispatch.py`: here every size is checked to be an int."""


@pytest.mark.parametrize("name", NAMES)
def test_operations_keep_the_rules_of_torch(name, used):
    torch.library.opcheck(getattr(torch.ops.kvcomp, name).default, tuple(samples()[name]), test_utils=CHECKS)
    assert name in used


@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_runs_the_kernel(name, used):
    args = samples()[name]
    want = getattr(ops, name)(*args)
    used.clear()
    torch.compiler.reset()
    got = torch.compile(lambda *given: getattr(ops, name)(*given), fullgraph=True, backend="aot_eager")(*args)
    assert used == {name}
    as_tuple = lambda result: result if isinstance(result, (tuple, list)) else (result,)  # noqa: E731
    assert_same_bits(tuple(map(torch.Tensor.cpu, as_tuple(got))), tuple(map(torch.Tensor.cpu, as_tuple(want))))


def test_a_wanted_gradient_runs_the_definition(used):
    keys, values, sketch = (part.clone().requires_grad_() for part in samples()["sketched_leverage"])
    with torch.enable_grad():
        ops.sketched_leverage(keys, values, sketch).sum().backward()
    assert keys.grad is not None and keys.grad.any() and not used


def test_kernels_can_be_switched_off(used):
    given = samples()
    ops.use_kernels(False)
    for name, args in given.items():
        getattr(ops, name)(*args)
    assert not used
