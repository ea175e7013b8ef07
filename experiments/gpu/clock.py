"""Clocks: how long a call takes on the device, and how much time is left.

A repetition on a GPU first reads a buffer larger than the L2 cache, which leaves nothing of the operands in it and no
line that has to be written back; CUDA events then enclose the call alone. As the GPU is busy with that buffer, the host
is ahead when the call begins. Where it is not, as the time in which the call returns exceeds `flush_ms`, the call was
`host_bound`, and its time is one of Python. Calls that are compared take turns; every figure is a median.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

GIB = 2**30
SECONDS = 0.25
"""That the repetitions of one call may take."""

Call = Callable[[], Any]
Row = dict[str, Any]
"""One measurement, as it is written."""


class Deadline:
    """Seconds that are left."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def left(self, reserve: float = 0.0) -> float:
        """Seconds until `reserve` seconds before the end."""
        return self.end - reserve - time.monotonic()


class Clock:
    """Times single calls on `device`, without the help of its cache."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        self.cuda = device.type == "cuda"
        size = min(GIB, torch.cuda.mem_get_info()[1] // 20) if self.cuda else 4
        self.other = torch.zeros(size // 4, device=device)
        self.flush_ms = self.wall(self.other.sum)[0] if self.cuda else 0.0

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def on_device(self, call: Call) -> tuple[float, float]:
        """Milliseconds of `call` on the device, and until it returned."""
        if not self.cuda:
            return self.wall(call)
        self.other.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        before = time.perf_counter()
        call()
        host = time.perf_counter() - before
        end.record()
        end.synchronize()
        return start.elapsed_time(end), 1e3 * host

    def wall(self, call: Call) -> tuple[float, float]:
        """Milliseconds of `call` from an idle device to an idle device, and until it returned."""
        self.other.sum()
        self.synchronize()
        before = time.perf_counter()
        call()
        host = time.perf_counter() - before
        self.synchronize()
        return 1e3 * (time.perf_counter() - before), 1e3 * host

    def free(self) -> int:
        """Bytes that can still be allocated."""
        if not self.cuda:
            return 1 << 62
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


@dataclass
class Timing:
    """Milliseconds of each repetition of one call, on the device and on the host, or why there are none."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ms(self) -> float | None:
        """Median."""
        return statistics.median(self.device) if self.device else None


def alternate(
    calls: Mapping[str, Call], clock: Clock, timed: Callable[[Call], tuple[float, float]]
) -> dict[str, Timing]:
    """Times the calls in turns, as often as fits into `SECONDS` each; one that raises is left out."""
    found, repeats = {name: Timing() for name in calls}, dict.fromkeys(calls, 0)

    def once(name: str) -> float:
        device, host = timed(calls[name])
        found[name].device.append(device)
        found[name].host.append(host)
        return device

    for name, call in calls.items():
        try:
            call()  # compiles
            repeats[name] = min(clock.repeats, max(3, int(1e3 * SECONDS / max(once(name), 1e-3))))
        except Exception as error:
            found[name].error = described(error)
    for turn in range(1, clock.repeats):
        for name in calls:
            if turn < repeats[name]:
                once(name)
    return found


def described(error: BaseException) -> str:
    """Type and the first lines of an error."""
    return f"{type(error).__name__}: {error}"[:500]


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Bytes per second, read and written, of copying a large tensor."""
    source = torch.ones(size // 4, device=clock.device)
    target = torch.empty_like(source)
    timing = alternate({"copy": lambda: target.copy_(source)}, clock, clock.on_device)["copy"]
    if timing.ms is None:
        raise RuntimeError(timing.error)
    return 2e3 * size / timing.ms
