"""Definitions as operations of torch."""

import textwrap

import pytest
import torch
from support import run_python

from kvcomp import dispatch, ops

SAMPLES = """
import torch
from kvcomp import ops
x, index = torch.randn(2, 21, 3, 64).transpose(1, 2), torch.randint(-1, 21, (2, 3, 9))  # as a model projects rows
parts = ops.pack(x, 4, 32, torch.bfloat16)
positions = torch.arange(21, dtype=torch.int32).repeat(3, 2, 1).transpose(0, 1)
queries, window = torch.randn(2, 6, 5, 64), torch.arange(16, 21).repeat(2, 1)
dense = [torch.randn(2, 3, 4, 64) for _ in range(4)]
query, weights = torch.randn(2, 6, 2, 64), torch.rand(2, 3, 2, 21)
samples = {
    "pack": (x, 4, 32, torch.bfloat16, True, index),
    "unpack": (*parts, 4, 32, 64, torch.float32),
    "packed_dot": (x[:, :, :2], *parts, 4, 32),
    "packed_weighted_sum": (weights, *parts, 4, 32, 64),
    "hadamard": (x,),
    "take_rows": (x, index.clamp_min(0)),
    "window_score": (queries, x, x + 1, positions, window, 0.125, 5, 5, 3, True),
    "value_range": (x,),
    "sketched_leverage": (x, x + 1, torch.randn(3, 64, 20)),
    "packed_decode": (
        query, query, list(parts), list(parts), dense, [positions, positions[..., :4], positions[..., :4]], [4, 4],
        [32, 32], 0.125,
    ),
    "token_noise": (positions, 5, 1, 2),
}
"""


def test_every_operation_keeps_the_rules_of_torch():
    """Schema, shapes without values, fixed and symbolic; without the type checks of this suite, which want ints."""
    code = """
    assert set(samples) == set(torch.ops.kvcomp)
    for name, args in samples.items():
        torch.library.opcheck(getattr(torch.ops.kvcomp, name).default, args)
        torch.compiler.reset()
        compiled = torch.compile(lambda *given: getattr(ops, name)(*given), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*args), getattr(ops, name)(*args), rtol=0, atol=0)
    """
    run_python(SAMPLES + textwrap.dedent(code))


def test_a_kernel_may_leave_a_case_to_the_definition(monkeypatch):
    calls = []

    class Kernels:
        @staticmethod
        def value_range(values):
            calls.append(values.shape)
            return NotImplemented if values.shape[2] == 3 else torch.zeros(values.shape[:3])

    monkeypatch.setattr(dispatch, "_kernels", lambda *_: Kernels)
    for rows, kernel_runs in ((3, False), (4, True)):
        values = torch.arange(2.0 * rows).view(1, 1, rows, 2)
        assert torch.equal(ops.value_range(values), torch.full((1, 1, rows), 0.0 if kernel_runs else 1.0))
    ops.use_kernels(False)
    try:
        assert ops.value_range(values).all()
    finally:
        ops.use_kernels(True)
    assert len(calls) == 2


def test_import_needs_neither_triton_nor_transformers():
    loaded = run_python("import sys, kvcomp.ops, kvcomp.evict, kvcomp.quant; print(*sys.modules)").split()
    assert not {"triton", "transformers", "numba", "bitsandbytes"} & set(loaded)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import kvcomp

    assert kvcomp.CompressedCache.__module__ == "kvcomp.cache"
    with pytest.raises(AttributeError, match="no attribute 'Compresed'"):
        kvcomp.Compresed  # noqa: B018
