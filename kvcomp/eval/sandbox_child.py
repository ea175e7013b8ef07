"""Runs `program.py` of the working directory under limits and an audit hook. A script, started by `sandbox.run`.

Arguments: bytes of address space, seconds of processor time, and the folders of installed packages. The package kvcomp
is not imported here: the process has to start fast and needs none of it.
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import ctypes  # noqa: F401 -- numpy imports it, which the hook would refuse
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

FILES = 64
"""Open files at most."""
FILE = 1 << 26
"""Bytes of a file at most."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

REFUSED = (
    "ctypes.",
    "os.exec",
    "os.fork",
    "os.killpg",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "socket.bind",
    "socket.connect",
    "socket.get",
    "socket.send",
    "subprocess.Popen",
    "syslog.",
)
"""Audit events that are refused by their beginning."""
PATHS = {
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (0, 1),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.removexattr": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.setxattr": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "sqlite3.connect": (0,),
}
"""Audit events that change files, and which of their arguments are paths."""
FOLDERS = {"os.chmod": 2, "os.chown": 3, "os.link": 2, "os.mkdir": 2, "os.remove": 1, "os.rename": 2, "os.rmdir": 1}
"""The first argument of such an event that may be an open folder, to which the path is relative."""
STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")


def guard(home: str, readable: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook: raises PermissionError for what a program may not do.

    It may write below `home`, and read there and below `readable`. Source of the events: the audit events table of the
    Python documentation.
    """
    realpath, fspath, readlink, own = os.path.realpath, os.fsdecode, os.readlink, os.getpid()

    def inside(path: Any, folders: tuple[str, ...], base: int = -1) -> bool:
        if isinstance(path, int) or path in STREAMS:
            return True  # Open already.
        text = fspath(path)
        if base >= 0:
            text = os.path.join(readlink(f"/proc/self/fd/{base}"), text)
        real = realpath(text)
        return real in DEVICES or any(real == folder or real.startswith(f"{folder}/") for folder in folders)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        allowed = True
        if event == "open":
            path, mode, flags = values
            writes = flags & WRITING if isinstance(flags, int) else set(mode or "r") & set("wax+")
            allowed = inside(path, (home,) if writes else readable)
        elif event in PATHS:
            place = FOLDERS.get(event)
            bases = [values[place + i] if place and place + i < len(values) else -1 for i in range(len(PATHS[event]))]
            allowed = all(inside(values[i], (home,), base) for i, base in zip(PATHS[event], bases, strict=True))
        elif event == "os.kill":
            allowed = values[0] == own
        elif event == "socket.__new__":
            allowed = values[1] == 1  # AF_UNIX, the pair of an event loop.
        elif event.startswith(REFUSED):
            allowed = False
        if not allowed:
            raise PermissionError(f"{event} is not allowed in the sandbox")

    return hook


def refuse(*values: Any) -> int:
    """Stands for the function behind `subprocess` and `multiprocessing`, which no event announces."""
    raise PermissionError("a new process is not allowed in the sandbox")


def limit(memory: int, seconds: int) -> None:
    """Set the limits; a soft one is the hard one too, so that the program cannot raise it.

    There is no RLIMIT_NPROC: it counts all processes and threads of the user, and root has none.
    """
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def main() -> None:
    """Run the program as `__main__`; what it raises ends the process as usual."""
    # The hook gets builtins of its own, so that a program which replaces some does not change it.
    globals()["__builtins__"] = dict(vars(builtins))
    memory, seconds, *packages = sys.argv[1:]
    home = os.path.realpath(os.getcwd())
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    sys.path.extend(packages)
    sys.argv = ["program.py"]
    for name in ("exit", "quit"):  # Those of the module site, which is not loaded.
        setattr(builtins, name, sys.exit)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    _posixsubprocess.fork_exec = refuse
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, *packages, "/usr", "/lib", "/lib64", "/etc")}
    limit(int(memory), int(seconds))
    sys.addaudithook(guard(home, (home, *sorted(prefixes))))
    exec(compile(source, os.path.join(home, "program.py"), "exec"), module.__dict__)


if __name__ == "__main__":
    main()
