"""Programs that nobody has read: what they may do, that they end, and that nothing is left of them."""

import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy
import pytest

from kvcomp.eval import sandbox


@pytest.fixture(params=["namespaces", "guard alone"])
def isolation(request, monkeypatch):
    """Both with the namespaces, where they work, and without."""
    if request.param == "guard alone":
        monkeypatch.setattr(sandbox, "isolation", tuple)
    elif not sandbox.isolation():
        pytest.skip("unshare does not work here")


def processes():
    """The processes of programs that run, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if str(sandbox.CHILD).encode() in line:
            found.append(line)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []
    deadline = time.monotonic() + 2
    while processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes() == []


def run(program, stdin="", seconds=5.0, **limits):
    start = time.monotonic()
    ran = sandbox.run(textwrap.dedent(program), stdin, seconds, **limits)
    assert time.monotonic() - start < seconds + 1.5
    return ran


def test_what_a_program_reads_and_writes(isolation):
    ran = run("import sys; print(input()); print(sys.stdin.read(), end=''); print('e', file=sys.stderr)", "a\nb\nc")
    assert (ran.stdout, ran.stderr, ran.status) == ("a\nb\nc", "e\n", "ok")
    assert 0 < ran.seconds < 5


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", "ok"),
        ("import sys; sys.exit(0)", "ok"),
        ("exit()", "ok"),
        ("import os; os._exit(0)", "ok"),
        ("import os; os.abort()", "error"),
        ("exit(3)", "error"),
        ("1 / 0", "error"),
        ("a b", "error"),
        ("x = '\0'", "error"),
        ("while True: pass", "timeout"),
        ("print(3, flush=True)\nwhile True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = bytearray(1 << 31)", "memory"),
        ("x = [0]\nwhile True: x += x", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()", "timeout"),
    ],
)
def test_how_a_program_ends(isolation, program, status):
    assert run(program, seconds=0.5 if status == "timeout" else 5.0, memory=1 << 28).status == status


def test_an_error_is_in_the_end_of_stderr():
    ran = run("import sys\nsys.stderr.write('x' * 100_000)\n1 / 0")
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n") and len(ran.stderr) == sandbox.TAIL


def test_a_flood_is_cut_off(isolation):
    ran = run("import sys\nwhile True: sys.stdout.write('x' * 5000)", output=10_000)
    assert ran.stdout == "x" * 10_000 and ran.seconds < 4
    ran = run("import sys\nwhile True: sys.stderr.write('x' * 5000)", seconds=1.0)
    assert (ran.stdout, ran.stderr, ran.status) == ("", "x" * sandbox.TAIL, "timeout")


def test_exactly_as_much_output_as_allowed_is_fine():
    ran = run("print('x' * 99)", output=100)
    assert (ran.stdout, ran.status) == ("x" * 99 + "\n", "ok")
    assert run("print('x' * 100)", output=100).status == "output"


def test_a_huge_input_is_read_or_left(isolation):
    stdin = "1 " * 4_000_000
    assert run("import sys; print(len(sys.stdin.read().split()))", stdin).stdout == "4000000\n"
    assert run("import sys; sys.stdin.close(); print(1)", stdin).stdout == "1\n"
    assert run("print(1)", stdin).stdout == "1\n"
    for name in (0, "/dev/stdin"):
        assert run(f"print(open({name!r}).read())", "é").stdout == "é\n"


def test_output_that_is_no_text_and_output_that_is_closed():
    assert run(r"import sys; sys.stdout.buffer.write(b'a\xff\xfe')").stdout == "a\ufffd\ufffd"
    assert run("import os; os.close(1); os.close(2)").status == "ok"
    assert run("import os; os.closerange(0, 64)\nwhile True: pass", seconds=0.5).status == "timeout"


def test_infinite_and_deep_recursion(isolation):
    assert "RecursionError" in run("def f(): return f()\nf()").stderr
    ended = run(
        "import sys; sys.setrecursionlimit(1 << 30)\ndef f(n): return f(n + 1) + 1\nf(0)", seconds=1.0, memory=1 << 28
    )
    assert ended.status in ("error", "memory", "timeout")
    deep = "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50_000))"
    assert run(deep).stdout == "50000\n"


def test_signals_that_are_ignored_do_not_keep_it_alive(isolation):
    program = """
        import os, signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        try: os.setsid()
        except OSError: pass
        while True: pass"""
    assert run(program, seconds=0.5).status == "timeout"


def test_no_environment_is_passed(isolation, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "sesame")
    ran = run("import os; print(dict(os.environ), os.environ['HOME'] == os.getcwd(), os.listdir('.'))")
    assert "sesame" not in ran.stdout and "True ['program.py']" in ran.stdout


def test_two_runs_are_the_same():
    program = "print(hash('a'), list({'a', 'b', 'c'}))"
    assert run(program).stdout == run(program).stdout


def test_packages_and_files_of_its_own_can_be_used(isolation):
    program = """
        import os, shutil, sqlite3, tempfile, asyncio, numpy
        open("a", "w").write("b"); os.rename("a", "c"); print(open("c").read())
        with tempfile.TemporaryDirectory() as folder: open(folder + "/x", "w").close()
        os.makedirs("d/e"); shutil.rmtree("d"); print(sorted(os.listdir(".")), file=open(os.devnull, "w"))
        sqlite3.connect(":memory:").close()
        async def seven(): return 7
        print(asyncio.run(seven()), numpy.linalg.inv(numpy.eye(50)).sum(), numpy.__version__)"""
    ran = run(program)
    assert (ran.stdout, ran.stderr) == (f"b\n7 50.0 {numpy.__version__}\n", "")


def test_folders_without_rights_are_removed():
    assert run("import os; os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)").status == "ok"


REFUSED = {
    "a socket": "import socket; socket.socket()",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "a name": "import socket; socket.gethostbyname('localhost')",
    "a page": "import urllib.request; urllib.request.urlopen('http://127.0.0.1/')",
    "subprocess": "import subprocess; subprocess.run(['true'])",
    "a shell": "import os; os.system('true')",
    "a pipe": "import os; os.popen('true')",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "fork": "import os; os.fork()",
    "a terminal": "import pty; pty.fork()",
    "a pool": "import multiprocessing; multiprocessing.Pool(2)",
    "spawned": "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
    "behind subprocess": "import _posixsubprocess; _posixsubprocess.fork_exec()",
    "ctypes": "import ctypes; ctypes.CDLL(None)",
    "the interpreter": "import ctypes; ctypes.pythonapi.Py_Exit",
    "killing": "import os; os.kill(os.getppid() or 1 << 20, 9)",
    "killing a group": "import os; os.killpg(0, 9)",
    "writing": "open(OUTSIDE, 'w')",
    "appending": "open(OUTSIDE, 'a')",
    "low writing": "import os; os.open(OUTSIDE, os.O_RDWR)",
    "reading": "open(OUTSIDE).read()",
    "reading itself": "open('/proc/self/environ').read()",
    "reading the grader": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "removing": "import os; os.remove(OUTSIDE)",
    "removing by pathlib": "import pathlib; pathlib.Path(OUTSIDE).unlink()",
    "removing a tree": "import os, shutil; shutil.rmtree(os.path.dirname(OUTSIDE))",
    "renaming": "import os; os.rename(OUTSIDE, 'mine')",
    "linking": "import os; os.link(OUTSIDE, 'mine')",
    "a way out by a link": "import os; os.symlink(OUTSIDE, 'mine'); open('mine', 'w')",
    "a way out by ..": "import os; open(os.path.relpath(OUTSIDE), 'w')",
    "a way out by chdir": "import os; os.chdir(os.path.dirname(OUTSIDE)); os.remove('precious')",
    "a way out by a folder": "import os; os.remove('precious', dir_fd=os.open(os.path.dirname(OUTSIDE), os.O_RDONLY))",
    "truncating": "import os; os.truncate(OUTSIDE, 0)",
    "rights": "import os; os.chmod(OUTSIDE, 0)",
    "a folder": "import os; os.mkdir(OUTSIDE + '.d')",
    "a database": "import sqlite3; sqlite3.connect(OUTSIDE + '.db').execute('create table a (b)')",
}


@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_raises_and_changes_nothing(program, tmp_path):
    outside = tmp_path / "kept" / "precious"
    outside.parent.mkdir()
    outside.write_text("gold")
    ran = run(f"OUTSIDE = {str(outside)!r}\n{program}")
    assert ran.status == "error" and "PermissionError" in ran.stderr and "in the sandbox" in ran.stderr, ran
    assert [path.name for path in outside.parent.iterdir()] == ["precious"]
    assert outside.read_text() == "gold" and outside.stat().st_mode & 0o777 == 0o644


def test_a_bounded_fork_bomb_has_no_children(isolation):
    program = """
        import os
        made = 0
        for _ in range(50):
            try: made += os.fork() >= 0
            except PermissionError: pass
        print(made)"""
    assert run(program).stdout == "0\n"


def test_the_hook_survives_what_a_program_does_to_modules(tmp_path):
    program = f"""
        import builtins, os, sys
        os.path.realpath = os.fsdecode = lambda path, **_: os.getcwd()
        builtins.any = builtins.isinstance = lambda *_: True
        sys.addaudithook(lambda *_: None)
        open({str(tmp_path / "new")!r}, "w")"""
    assert run(program).status == "error"
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not sandbox.isolation(), reason="unshare does not work here")
def test_namespaces_kill_a_descendant_that_left_the_group_and_have_no_network(monkeypatch, tmp_path):
    """By a child without the guard, as if a program had broken it."""
    child = tmp_path / sandbox.CHILD.name
    child.write_text("exec(open('program.py').read())")
    monkeypatch.setattr(sandbox, "CHILD", child)
    program = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 64)
                time.sleep(60)
            os._exit(0)
        time.sleep(END)
        print(open('/proc/net/dev').read().count(':'), end='')"""
    start = time.monotonic()
    ran = run(program.replace("END", "0.2"))
    assert (ran.status, ran.stdout) == ("ok", "1")
    assert run(program.replace("END", "60"), seconds=0.5).status == "timeout"
    assert time.monotonic() - start < 5


def test_a_descendant_in_the_group_is_killed_without_namespaces(monkeypatch, tmp_path):
    child = tmp_path / sandbox.CHILD.name
    child.write_text("import os, time\nif os.fork() == 0: time.sleep(60)\nprint(7)")
    monkeypatch.setattr(sandbox, "CHILD", child)
    monkeypatch.setattr(sandbox, "isolation", tuple)
    assert run("").stdout == "7\n"


def test_no_namespaces_where_unshare_is_missing(monkeypatch):
    monkeypatch.setattr(sandbox, "UNSHARE", ("no-such-command",))
    sandbox.isolation.cache_clear()
    try:
        assert sandbox.isolation() == ()
    finally:
        sandbox.isolation.cache_clear()


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"memory": 0}, {"output": -1}, {"seconds": float("nan")}])
def test_a_limit_that_is_not_positive_is_an_error(limits):
    with pytest.raises(ValueError, match="must be above 0, got"):
        sandbox.run("", **limits)


def test_another_system_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="on Linux only, this is darwin"):
        sandbox.run("")


def test_an_interrupt_kills_the_program(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("while True: pass", seconds=60.0)
