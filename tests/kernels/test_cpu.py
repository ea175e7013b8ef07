"""The numba kernels against the definitions; `tests/quant/test_packed.py` holds both against plain loops."""

import os
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import run_python

from kvcomp import ops

cpu = pytest.importorskip("kvcomp_kernels.cpu.pack", reason="numba is not installed")


@pytest.fixture(autouse=True)
def definitions():
    ops.use_kernels(False)
    yield
    ops.use_kernels(True)


def case(bits, width, group_size, heads=3, rows=65, queries=2, dtype=torch.bfloat16, batch=2):
    generator = torch.Generator().manual_seed(bits * width + rows)
    x, query, weights = (
        torch.randn(batch, heads, *shape, generator=generator)
        for shape in ((rows, width), (queries, width), (queries, rows))
    )
    return ops.pack(x.to(dtype), bits, group_size, dtype), query, weights.softmax(-1)


def assert_as_defined(parts, query, weights, bits, group_size, width, dtype=torch.bfloat16):
    rows = cpu.unpack(*parts, bits, group_size, width, dtype)
    assert torch.equal(rows, ops.unpack(*parts, bits, group_size, width, dtype))
    exact = ops.unpack(*parts, bits, group_size, width, torch.float32).double()
    for got, want in (
        (cpu.packed_dot(query, *parts, bits, group_size), query.double() @ exact.transpose(2, 3)),
        (cpu.packed_weighted_sum(weights, *parts, bits, group_size, width), weights.double() @ exact),
    ):
        assert got.dtype == torch.float32 and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "width, group_size", [(64, 64), (80, 32), (96, 64), (128, 64), (256, 64), (67, 16), (5, 5), (1, 1)]
)
def test_every_width_and_group(bits, width, group_size):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_as_defined(*case(bits, width, group_size, dtype=dtype), bits, group_size, width, dtype)


@pytest.mark.parametrize("rows", [1, 63, 64, 129, 1000])
@pytest.mark.parametrize("heads, queries", [(1, 8), (3, 1), (8, 4)])
def test_every_number_of_rows_heads_and_queries(rows, heads, queries):
    assert_as_defined(*case(4, 64, 32, heads, rows, queries), 4, 32, 64)


def test_no_rows():
    parts, query, weights = case(4, 64, 32, rows=0)
    assert cpu.packed_dot(query, *parts, 4, 32).shape == (2, 3, 2, 0)
    assert not cpu.packed_weighted_sum(weights, *parts, 4, 32, 64).any()
    assert cpu.unpack(*parts, 4, 32, 64, torch.bfloat16).shape == (2, 3, 0, 64)


def test_strides_are_followed():
    parts, query, weights = case(4, 64, 32)
    strided = [torch.stack([part, part], dim=3)[:, :, :, 1] for part in parts]
    assert not strided[0].is_contiguous()
    queries = query.transpose(2, 3).contiguous().transpose(2, 3)
    assert_as_defined(strided, queries, weights, 4, 32, 64)


def test_threads_share_the_heads(monkeypatch):
    monkeypatch.setattr(cpu, "SMALL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_as_defined(*case(4, 64, 32, heads=5), 4, 32, 64)
        given = case(8, 64, 32, heads=8)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: assert_as_defined(*given, 8, 32, 64), range(8)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork():
    code = """
        import os, torch
        from kvcomp_kernels.cpu import pack as packed
        from kvcomp import ops
        torch.set_num_threads(2)
        packed.SMALL = 0
        rows = torch.randn(1, 4, 50, 64)
        parts = ops.pack(rows, 4, 64, torch.bfloat16)
        query = torch.randn(1, 4, 2, 64)
        want = packed.packed_dot(query, *parts, 4, 64)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(packed.packed_dot(query, *parts, 4, 64), want) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    run_python(textwrap.dedent(code))


@pytest.mark.parametrize("width", [8, 64, 80, 96, 128, 256])
def test_the_rotation_has_the_bits_of_its_definition(width):
    for rows in (torch.randn(2, 3, 65, width), torch.randn(2, 3, width, 65).transpose(2, 3), torch.randn(0, width)):
        before = rows.clone()
        for x in (rows, rows.bfloat16()):
            assert torch.equal(cpu.hadamard(x), ops.hadamard(x))
        assert torch.equal(rows, before)
