"""Running a program that nobody has read: `run`.

The program gets a Python process of its own in a fresh folder, without the environment of this one, with limits on
time, memory and output. `kvcomp/eval/sandbox_child.py` sets the limits and then refuses, by an audit hook that cannot
be removed, the network, other processes and files outside of the folder. Where `unshare` works without being root, the
process also gets user, network and process namespaces: no network device, and every descendant dies with it.

This is a guard against accidents and careless programs, not against an attacker: a program that is out to break an
audit hook inside its own interpreter can do so, and then has the rights of the user who runs the evaluation, less what
the namespaces take. The disk is not limited, only each file (64 MiB). Run programs of a model that you do not trust in
a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

Status = Literal["ok", "error", "timeout", "memory", "output"]
"""How a program ended: "ok", exit code 0; "error", another one or a signal; "timeout", killed when its seconds were
over; "memory", ended by a MemoryError; "output", killed for writing too much."""

CHILD = Path(__file__).with_name("sandbox_child.py")
TAIL = 4096
"""Bytes kept of the end of stderr."""
CHUNK = 1 << 16
POLL = 0.05
"""Seconds between two looks whether the program has ended while something still holds its output open."""
UNSHARE = ("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Ran:
    """How a program ran: what it wrote to `stdout`, the end of its `stderr`, how it ended, and its `seconds`."""

    stdout: str
    stderr: str
    status: Status
    seconds: float


def run(program: str, stdin: str = "", seconds: float = 6.0, memory: int = 1 << 30, output: int = 1 << 20) -> Ran:
    """Run a Python program and return how it went; whatever the program does, this returns, and nothing is left.

    `stdin` is what it reads, `seconds` the time it may take from its start, `memory` the bytes of its address space,
    `output` the bytes it may write to stdout; what is over that is cut off and the program killed. Of stderr only the
    end is kept. Output that is not UTF-8 has replacement characters. Names of the interpreter's own folders, numpy and
    other installed packages can be imported. Hashes are not randomised, so that a program runs the same every time.

    Raises ValueError for a limit that is not positive, and where there is no Linux.
    """
    for name, value in (("seconds", seconds), ("memory", memory), ("output", output)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    if sys.platform != "linux":
        raise ValueError(
            f"programs are run on Linux only, this is {sys.platform}: grade there, in a container if need be"
        )
    folder = tempfile.mkdtemp(prefix="kvcomp-sandbox-")
    try:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        with tempfile.TemporaryFile() as source:
            source.write(stdin.encode("utf-8", errors="replace"))
            source.seek(0)
            return _watch(_start(folder, source, seconds, memory), seconds, output)
    finally:
        _remove(folder)


@cache
def isolation() -> tuple[str, ...]:
    """The command that puts a program into namespaces of its own; empty where that does not work. Tried once."""
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return UNSHARE if tried.returncode == 0 else ()


def _start(folder: str, stdin: IO[bytes], seconds: float, memory: int) -> subprocess.Popen[bytes]:
    """The process of the program in `folder`, with a session and a process group of its own."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    python = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", str(CHILD)]
    # One thread each: a pool of threads takes address space for every core.
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
    return subprocess.Popen(
        [*isolation(), *python, str(memory), str(int(seconds) + 2), *packages],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", **threads},
        start_new_session=True,
        bufsize=0,
    )


def _watch(process: subprocess.Popen[bytes], seconds: float, output: int) -> Ran:
    """Collect the output until the program ends or has to be ended; then kill its group and reap it."""
    start = time.monotonic()
    assert process.stdout is not None and process.stderr is not None
    out, err = bytearray(), bytearray()
    ended: Status | None = None
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        for pipe, buffer in ((process.stdout, out), (process.stderr, err)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, buffer)
        try:
            while ended is None and not _exited(process):
                _collect(selector, POLL)
                del err[:-TAIL]
                if len(out) > output:
                    ended = "output"
                elif time.monotonic() - start > seconds:
                    ended = "timeout"
        finally:
            _kill(process)
        while len(out) <= output and _collect(selector, 0.0):
            pass
    taken = time.monotonic() - start
    if len(out) > output:
        ended = "output"
        del out[output:]
    stderr = err[-TAIL:].decode("utf-8", errors="replace")
    if ended is None:
        ended = "ok" if process.returncode == 0 else "memory" if "MemoryError" in stderr else "error"
    return Ran(out.decode("utf-8", errors="replace"), stderr, ended, taken)


def _collect(selector: selectors.BaseSelector, wait: float) -> bool:
    """Read a chunk of each pipe that has one into its buffer; whether there was any."""
    if not selector.get_map():
        time.sleep(wait / 10)  # Both pipes are closed: the program is about to end, or goes on without them.
        return False
    read = False
    for key, _ in selector.select(wait):
        chunk = os.read(key.fd, CHUNK)
        if chunk:
            key.data.extend(chunk)
            read = True
        else:
            selector.unregister(key.fileobj)
    return read


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended. It is not reaped: until then no other process group can get its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove(folder: str) -> None:
    """Remove the folder, also if the program took the rights away from folders in it.

    A few times over, because a descendant that is being killed may still write.
    """
    for _ in range(5):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
        for parent, names, _ in os.walk(folder):
            for path in (os.path.join(parent, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(POLL)
