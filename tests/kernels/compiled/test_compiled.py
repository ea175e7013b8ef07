"""Compiles what the host functions launch at the geometry of real models for each GPU, and reads the machine code."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

triton = pytest.importorskip("triton", reason="kernels are compiled by triton, which is not installed")
harness = pytest.importorskip("harness")
tl = pytest.importorskip("triton.language")

BF16, FP16 = torch.bfloat16, torch.float16
HEADS, ROWS, WINDOW, INTERVAL = 8, 4096, 64, 64
STREAM = 1 << 19
"""Bytes from which a tensor is worth 16-byte loads."""


def rows(device, count=ROWS + INTERVAL, width=128, dtype=BF16, room=INTERVAL):
    """Rows as they are stored: the used part of a buffer with room for more."""
    return torch.empty(1, HEADS, count + room, width, dtype=dtype, device=device)[:, :, :count]


def positions(device, count=ROWS + INTERVAL, room=INTERVAL):
    return torch.empty(1, HEADS, count + room, dtype=torch.int32, device=device)[:, :, :count]


def queries(device, heads=32, window=WINDOW, width=128, dtype=BF16):
    return torch.empty(1, heads, window, width, dtype=dtype, device=device)


def sketch(device, width=128, rank=20):
    return torch.empty(HEADS, width, rank, device=device)


def chosen(device, count=ROWS):
    return torch.empty(1, HEADS, count, dtype=torch.int64, device=device)


def group_of(bits, width):
    return width if bits == 8 else min(64, width)


def packed(device, bits, width=128, dtype=BF16, count=ROWS):
    """Codes, scale and zero point."""
    groups = width // group_of(bits, width)
    codes = torch.empty(1, HEADS, count, width * bits // 8, dtype=torch.uint8, device=device)
    return [codes, *(torch.empty(1, HEADS, count, groups, dtype=dtype, device=device) for _ in range(2))]


def pack(bits, width=128, dtype=BF16, rotate=False, indexed=False, scale_dtype=None):
    def arguments(device):
        index = chosen(device) if indexed else None
        values = rows(device, width=width, dtype=dtype)
        return values, bits, group_of(bits, width), scale_dtype or dtype, rotate, index

    return Case("pack", "pack", arguments)


def unpack(bits, width=128, dtype=BF16, out=None):
    def arguments(device):
        return *packed(device, bits, width, dtype), bits, group_of(bits, width), width, out or dtype

    return Case("pack", "unpack", arguments, plain="kernel")


def score(heads=32, width=128, dtype=BF16, drop=WINDOW, padded=False, values=True):
    def arguments(device):
        keys, magnitude = rows(device, width=width, dtype=dtype), rows(device, width=width, dtype=dtype)
        window = torch.empty(1, WINDOW, dtype=torch.int32, device=device)
        query = queries(device, heads, width=width, dtype=dtype)
        return query, keys, magnitude if values else None, positions(device), window, 0.088, drop, drop, 5, padded

    return Case("score", "window_score", arguments)


def decode(bits, heads=32, width=128, dtype=BF16, rotated=False, new=1, counts=(3700, 205, 97)):
    def arguments(device):
        room = (0, 0, 95)  # of packed, exact and recent rows; only the last are in a buffer
        query = queries(device, heads, new, width, dtype)
        turned = query.float() if rotated else query
        keys, values = (packed(device, one, width, dtype, counts[0]) for one in bits)
        dense = [rows(device, counts[part], width, dtype, room[part]) for part in (1, 1, 2, 2)]
        seen = [positions(device, count, free) for count, free in zip(counts, room, strict=True)]
        return query, turned, keys, values, dense, seen, list(bits), [group_of(one, width) for one in bits], 0.088

    return Case("decode", "packed_decode", arguments, plain="loop")


@dataclass(frozen=True)
class Case:
    """A host function with its arguments. `plain`: where codes become floats, which takes no conversion, be it in the
    whole `kernel` or in its `loop`, besides which integers are divided and logarithms taken."""

    module: str
    function: str
    arguments: Callable
    plain: str = ""

    def launches(self, name):
        """What the host function launches on a device, and whether each kernel streams rows."""
        function = getattr(importlib.import_module(f"kvcomp_kernels.{self.module}"), self.function)
        with harness.fake_device(name) as recorder:
            arguments = self.arguments(recorder.device)
            result = function(*arguments)
            assert result is not NotImplemented, "left to the definition"
            large = [tensor for tensor in tensors_in(arguments) if tensor.untyped_storage().nbytes() >= STREAM]
            return [(launch, launch.reads(large)) for launch in recorder.launches]


def tensors_in(arguments):
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from tensors_in(argument)


CASES = {
    "pack-2": pack(2),
    "pack-4": pack(4),
    "pack-8": pack(8),
    "pack-4-rotated-at": pack(4, rotate=True, indexed=True),
    "pack-4-rotated-256": pack(4, width=256, rotate=True),
    "pack-4-fp16-64": pack(4, width=64, dtype=FP16),
    "pack-4-scale-fp32": pack(4, scale_dtype=torch.float32),
    "unpack-2": unpack(2),
    "unpack-4": unpack(4),
    "unpack-8": unpack(8),
    "unpack-4-to-fp32": unpack(4, out=torch.float32),
    "unpack-8-256": unpack(8, width=256),
    "unpack-4-fp16-64": unpack(4, width=64, dtype=FP16),
    "hadamard": Case("pack", "hadamard", lambda device: (rows(device, room=0),)),
    "hadamard-256": Case("pack", "hadamard", lambda device: (rows(device, width=256, room=0),)),
    "hadamard-queries": Case("pack", "hadamard", lambda device: (queries(device, window=1),)),
    "take-rows": Case("pack", "take_rows", lambda device: (rows(device), chosen(device))),
    "take-codes": Case("pack", "take_rows", lambda device: (packed(device, 4)[0], chosen(device))),
    "take-positions": Case("pack", "take_rows", lambda device: (positions(device), chosen(device))),
    "score-4b": score(),
    "score-14b-causal-padded": score(heads=40, drop=0, padded=True, values=False),
    "score-fp16-64": score(width=64, dtype=FP16),
    "score-256": score(heads=16, width=256),
    "value-range": Case("score", "value_range", lambda device: (rows(device),)),
    "leverage": Case("score", "sketched_leverage", lambda device: (rows(device), rows(device), sketch(device))),
    "decode-k8v4-4b": decode((8, 4)),
    "decode-k4v4-rotated-14b": decode((4, 4), heads=40, rotated=True),
    "decode-k2v2-4b-several": decode((2, 2), new=4),
    "decode-k8v4-fp16-64": decode((8, 4), width=64, dtype=FP16),
    "decode-k8v4-256": decode((8, 4), heads=16, width=256),
    "noise": Case("noise", "token_noise", lambda device: (positions(device), 2**40 + 1, 3, 2)),
}
SOME = {
    "pack-2": ["sm_90"],
    "pack-8": ["gfx942"],
    "pack-4-rotated-at": ["sm_90", "gfx942"],
    "pack-4-rotated-256": ["sm_80"],
    "pack-4-fp16-64": ["sm_100"],
    "pack-4-scale-fp32": ["sm_90"],
    "unpack-2": ["sm_90", "gfx942"],
    "unpack-8": ["sm_80"],
    "unpack-4-to-fp32": ["sm_100"],
    "unpack-8-256": ["gfx942"],
    "unpack-4-fp16-64": ["sm_89"],
    "hadamard": ["sm_80", "sm_90", "gfx942"],
    "hadamard-256": ["sm_89"],
    "hadamard-queries": ["sm_100"],
    "take-rows": ["sm_80", "sm_100", "gfx942"],
    "take-codes": ["sm_90"],
    "take-positions": ["gfx942"],
    "score-4b": ["sm_80", "sm_90", "sm_100", "gfx942"],
    "score-14b-causal-padded": ["sm_80", "gfx942"],
    "score-fp16-64": ["sm_100"],
    "score-256": ["sm_89"],
    "value-range": ["sm_90", "gfx942"],
    "decode-k8v4-4b": ["sm_80", "sm_90", "sm_100", "gfx942"],
    "decode-k4v4-rotated-14b": ["sm_89"],
    "decode-k2v2-4b-several": ["sm_90"],
    "decode-k8v4-fp16-64": ["sm_100"],
    "decode-k8v4-256": ["gfx942"],
    "noise": ["sm_80", "gfx942"],
}
"""Devices of the cases that are not compiled for all, so that the tests take two minutes; COMPILE_ALL=1 leaves none
out."""


def pairs():
    """Cases by device."""
    assert SOME.keys() <= CASES.keys()
    for case in CASES:
        for name in harness.DEVICES:
            if os.environ.get("COMPILE_ALL") or name in SOME.get(case, harness.DEVICES):
                yield pytest.param(CASES[case], name, id=f"{case}-{name}")


@pytest.mark.parametrize(("case", "name"), list(pairs()))
def test_machine_code(case, name):
    launches = case.launches(name)
    assert launches
    for launch, streams in launches:
        check(harness.compiled(name, launch), name, streams, case.plain)


def check(code, name, streams, plain=""):
    """Asserts what holds for every kernel."""
    assert code.spilled == 0 and code.local == 0, f"spills: {code}"
    assert code.shared <= harness.DEVICES[name].shared, f"shared memory: {code}"
    assert code.columns <= harness.COLUMNS, f"tensor memory: {code}"
    if streams:
        assert code.wide > 0, f"no load of 16 bytes: {code}"
    if plain:
        assert (code.loop if plain == "loop" else code.conversions) == 0, f"conversions: {code}"


def test_a_growing_cache_compiles_its_decoding_once():
    lengths = [(3700, 205, 97), (3712, 208, 112), (1, 1, 1), (0, 0, 16), (640, 0, 64)]
    steps = [decode((8, 4), counts=counts, new=new).launches("sm_90") for counts in lengths for new in (2, 4)]
    for several in zip(*steps, strict=True):
        kernels = [harness.kernel("sm_90", launch) for launch, _ in several if launch.name == "shares"]
        assert all(kernel is kernels[0] for kernel in kernels)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_host_function_reads_a_value_from_the_device(case):
    assert case.launches("sm_90")  # any read raises


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: int(x.sum()),
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x[x > 0],
    ],
    ids=["item", "int", "if", "tolist", "cpu", "to", "mask"],
)
def test_a_read_from_the_device_is_seen(read):
    with harness.fake_device("sm_90") as recorder, pytest.raises(harness.HostRead):
        read(torch.empty(8, device=recorder.device))


@triton.jit
def row_sums(x, out, count, stride, width: tl.constexpr, rows: tl.constexpr):
    channel = tl.arange(0, width)
    total = tl.zeros([rows, width], tl.float32)
    for start in range(0, count, rows):
        row = start + tl.arange(0, rows)
        total += tl.load(x + row[:, None] * stride + channel, mask=(row < count)[:, None], other=0).to(tl.float32)
    tl.store(out + channel, tl.sum(total, 0))


@triton.jit
def product(x, y, out, count, size: tl.constexpr, depth: tl.constexpr):
    row, column, within = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :], tl.arange(0, depth)
    total = tl.zeros([size, size], tl.float32)
    for start in range(0, count, depth):
        left = tl.load(x + row * count + start + within[None, :])
        right = tl.load(y + (start + within[:, None]) * size + column)
        total = tl.dot(left, right, total)
    tl.store(out + row * size + column, total)


def sums(name, dtype=BF16, stride=128, first=0, tile=16, **options):
    with harness.fake_device(name) as recorder:
        x = torch.empty(4096, stride, dtype=dtype, device=recorder.device)[:, first:]
        out = torch.empty(128, device=recorder.device)
        row_sums[(1,)](x, out, x.shape[0], x.stride(0), width=128, rows=tile, **FUSED, **options)
    return harness.compiled(name, recorder.launches[0])


FUSED = {"enable_fp_fusion": True}  # triton 3.9 warns where it is not told
FEW_REGISTERS = {"sm_90": {"maxnreg": 24}, "gfx942": {"waves_per_eu": 8, "num_warps": 1}}


@pytest.mark.parametrize("name", FEW_REGISTERS)
def test_registers_that_run_out_are_seen(name):
    check(sums(name, tile=32), name, streams=True, plain="kernel")
    code = sums(name, tile=32, **FEW_REGISTERS[name])
    assert code.spilled > 0
    with pytest.raises(AssertionError, match="spills"):
        check(code, name, streams=True)


@pytest.mark.parametrize("name", FEW_REGISTERS)
@pytest.mark.parametrize("place", [{"stride": 129}, {"stride": 144, "first": 1}], ids=["stride", "start"])
def test_rows_at_odd_addresses_are_seen(name, place):
    code = sums(name, **place)
    assert code.narrow > 0
    with pytest.raises(AssertionError, match="no load of 16 bytes"):
        check(code, name, streams=True)


@pytest.mark.parametrize("name", harness.DEVICES)
def test_conversions_are_seen(name):
    code = sums(name, dtype=torch.uint8)
    assert code.conversions >= code.loop > 0
    for plain in ("loop", "kernel"):
        with pytest.raises(AssertionError, match="conversions"):
            check(code, name, streams=False, plain=plain)


def test_shared_memory_beyond_the_limit_is_seen():
    with harness.fake_device("sm_89") as recorder:
        x, y = (torch.empty(32, 4096, dtype=FP16, device=recorder.device) for _ in "xy")
        out = torch.empty(32, 32, device=recorder.device)
        product[(1,)](x, y, out, 4096, size=32, depth=512, num_stages=4, **FUSED)
    with pytest.raises(AssertionError, match="shared memory"):
        check(harness.compiled("sm_89", recorder.launches[0]), "sm_89", streams=True)


def test_a_loop_is_what_a_branch_goes_back_to():
    text = "one\n.L_x_0:\ntwo\nBRA `(.L_x_1)\nBRA `(.L_x_0)\n.L_x_1:\nthree"
    assert "two" in harness.loops(text, r"(\.L_x_\d+):", r"BRA\S* .*?\(?(\.L_x_\d+)")
    assert "three" not in harness.loops(text, r"(\.L_x_\d+):", r"BRA\S* .*?\(?(\.L_x_\d+)")
