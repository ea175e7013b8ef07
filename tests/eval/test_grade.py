"""The graders: answers as models write them, right and wrong ones in pairs."""

import json
import os
import textwrap
import threading
import time

import pytest

from kvcomp.eval import grade, math_answer, math_text, programs
from kvcomp.eval.task import Problem


def problem(answer):
    return Problem("one", "", answer)


def coded(*cases, function=None, seconds=5.0):
    tests = [{"input": given, "output": output} for given, output in cases]
    return problem(json.dumps({"tests": tests, "function": function, "seconds": seconds}))


MATH = r"""
\frac{1}{2} | 0.5 | 0.51
\frac{1}{2} | 1/2 | -1/2
0.5 | \dfrac12 | \dfrac13
\frac{1}{2} | \tfrac{2}{4} | 2
\frac13 | 0.333333 | 0.33
\sqrt{2} | 1.41421356 | 1.4142
\sqrt{3} | \frac{3}{\sqrt{3}} | \frac{1}{\sqrt3}
1\frac{1}{2} | \frac{3}{2} | \frac{1}{2}
3\frac12 | 3 1/2 | 31/2
(1,2] | (1, 2] | [1,2]
(-\infty,2)\cup(3,\infty) | (3,\infty)\cup(-\infty,2) | (-\infty,2]\cup(3,\infty)
x \in [-2,7] | [-2,7] | (-2,7)
1, 2 | 2, 1 | 1, 3
1, -2 | \{-2, 1\} | -1, 2
1,2,3 | 3, 1, 2 | 3, 1
2,3 | x=2, x=3 | x=2
2,3 | 2 \text{ and } 3 | 2 \text{ and } 4
(1,3) | \left(1, 3\right) | (3,1)
\left( 3, \frac{\pi}{2} \right) | (3, \pi/2) | (3, \pi/3)
12 | 12\text{ cm} | 13\text{ cm}
12\text{ cm} | 12 | 1.2
12 | 12 \mbox{ cm}^2 | 12^2
12 | 12 cm | 12x
12 | 12 apples. | 21 apples
5 | \$5 | \$6
5.50 | \$5.5 | 5.05
50\% | 50 | 500
0.5 | 50\% | 5\%
0 | -0 | 1
1000 | 1,000 | 1,0000
1,\!000 | 1000 | 100
1{,}000 | 1\,000 | 10,00
1000 | 1 000 | 1 001
1234567 | 1,234,567 | 1,234,568
(1,0) | (1, 0) | 1000
\text{Evelyn} | Evelyn | Eve
\text{June 20} | June 20 | June 21
\text{(C)} | C | D
C | \text{(C)} | (D)
east | \text{east} | \text{west}
90^\circ | 90 | 91
90 | 90° | 9°
120 | 120\text{ degrees} | 12\text{ degrees}
-3 | - 3 | 3
1 \pm \sqrt{2} | 1-\sqrt2, 1+\sqrt2 | 1+\sqrt2
1.2\times10^{3} | 1200 | 120
1200 | 1.2e3 | 1.2e4
0.00012 | 1.2e-4 | 1.2e4
\begin{pmatrix}1 &2 \\ 3&4 \end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix}
5 | x=5 | x=6
x=5 | 5 | y=5
y = 2x+3 | 3+2x | 3+x
x^2+2x+1 | (x+1)^2 | (x-1)^2
p - q | -q+p | q-p
2k\pi | 2\pi k | \pi k
\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2} | \frac{-1\pm\sqrt{17}}{2} | \frac{1\pm\sqrt{17}}{2}
\pm 3 | -3, 3 | 3
2, 4 | x = 3 ± 1 | x = 3 ± 2
\frac13 | 0.\overline{3} | 0.\overline{4}
-\frac{61}{495} | -0.1\overline{23} | 0.1\overline{23}
73 | 073 | 730
2^{99} | 633825300114114700748351602688 | 633825300114114700748351602689
\log_2 3 | \frac{\ln 3}{\ln 2} | \frac{\ln 2}{\ln 3}
2516_8 | 2516_{8} | 2516_9
2516_8 | 2516 | 2517_8
3+2i | 2i+3 | 3-2i
10^{20} | 100000000000000000000 | 100000000000000000001
12345678901234567890 | 12345678901234567890 | 12345678901234567891
10 | \binom{5}{2} | \binom{5}{1}
120 | 5! | 4!
6 | 6.0 | 6.0001
3 | {3}. | {33}.
3 | $3$ | $2$
7 | \mathbf{7} | \mathbf{8}
2 | 2\, | 2\,0
"""
CASES = [tuple(part.strip() for part in line.split(" | ")) for line in MATH.strip().split("\n")]


@pytest.mark.parametrize(("reference", "right", "wrong"), CASES)
def test_equal_answers_are_right_and_others_wrong(reference, right, wrong):
    for answer, correct in ((reference, True), (right, True), (wrong, False)):
        graded = grade.math(f"So it is \\boxed{{{answer}}}.", problem(reference))
        assert (graded.correct, graded.found) == (correct, answer)


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} m", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{\\begin{pmatrix} 1 \\\\{2} \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\{2} \\end{pmatrix}"),
        ("The answer is 4. \\boxed{5", None),
        ("The answer is 4. \\boxed{}", None),
        ("\\boxed{ }", None),
        ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
        ("perhaps \\boxed{1}</think>so \\boxed{2}", "2"),
        ("<think>\\boxed{1}</think>I do not know", None),
        ("<think>\\boxed{1} wait", None),
        ("<think>a</think><think>\\boxed{1}", None),
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234\n", "1,234"),
        ("#### Conclusion\nThe answer is 3.", "3"),
        ("The answer is 3.5 m. Done.", "3.5 m"),
        ("The answer is 4, no. The answer is $\\frac{1}{2}$, I think.", "\\frac{1}{2}"),
        ("**Final answer:** \\(x^2\\)", "x^2"),
        ("The final answer is:\n\\[\n12\n\\]", "12"),
        ("**Answer: 42**", "42"),
        ("The answer is **42**.", "42"),
        ("The answers are 1 and 2.", "1 and 2"),
        ("So we get 7 and then 8.", None),
        ("answering is 7", None),
        ("", None),
    ],
)
def test_where_a_completion_has_its_answer(completion, found):
    assert math_text.find(completion) == found
    if found is None:
        assert not grade.math(completion, problem("1")).correct


@pytest.fixture
def one_second(monkeypatch):
    math_answer.WORKER.close()
    monkeypatch.setattr(math_answer, "SECONDS", 1.0)
    yield
    math_answer.WORKER.close()


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "9999999^{9999999}", "(10^9)!"])
def test_a_huge_answer_ends_in_time_and_the_next_one_is_right(answer, one_second):
    start = time.monotonic()
    assert not grade.math(f"\\boxed{{{answer}}}", problem("5")).correct
    assert grade.math("\\boxed{10/2}", problem("5")).correct
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "answer", ["\\frac{", "}{", "\\frac{1}{0}", "((((", "(" * 100, "\\sum_{", "a\nb", "\0", "\ud800", "💥"]
)
def test_nonsense_is_wrong_and_no_error(answer):
    assert not grade.math(f"The answer is: {answer}", problem("5")).correct
    assert not math_answer.equal("5", answer)


def test_a_reference_that_cannot_be_parsed_is_an_error():
    with pytest.raises(ValueError, match=r"cannot parse the reference answer '\\\\frac\{' in time"):
        grade.math("\\boxed{5}", problem("\\frac{"))


def test_a_reference_that_hangs_is_an_error(monkeypatch):
    monkeypatch.setattr(math_answer, "WALL", 0.0)
    with pytest.raises(ValueError, match="cannot parse the reference answer '0.*299' in time"):
        math_answer.equal("+".join(map(str, range(300))), "5")
    monkeypatch.undo()
    assert math_answer.equal("5", "10/2")


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    math_answer.WORKER.close()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'kvcomp\[eval\]'"):
        grade.math("\\boxed{5}", problem("6"))


def test_grading_is_safe_in_threads_and_uses_one_process():
    results = {}

    def work(number):
        results[number] = [math_answer.equal(str(number), f"{2 * k}/2") for k in range(6)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    worker = math_answer.WORKER
    for thread in threads:
        thread.join()
    assert results == {number: [k == number for k in range(6)] for number in range(6)}
    before = worker.process.pid
    assert math_answer.equal("3", "6/2") and worker.process.pid == before


def test_a_killed_worker_is_replaced():
    assert math_answer.equal("3", "6/2")
    math_answer.WORKER.process.kill()
    math_answer.WORKER.process.wait()
    assert math_answer.equal("3", "6/2")


def test_a_fork_has_a_worker_of_its_own():
    assert math_answer.equal("3", "6/2")
    before = math_answer.WORKER.process.pid
    child = os.fork()
    if child == 0:
        right = math_answer.equal("3", "6/2") and math_answer.WORKER.process.pid != before
        math_answer.WORKER.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert math_answer.equal("3", "6/2") and math_answer.WORKER.process.pid == before


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("\\boxed{C}", "C"),
        ("\\boxed{A} no, \\boxed{(C)}", "C"),
        ("\\boxed{\\text{C}}", "C"),
        ("$\\boxed{\\textbf{(C)}}$", "C"),
        ("\\boxed{C) 12 m}", "C"),
        ("\\boxed{\\text{C: a cat}}", "C"),
        ("The answer is (C)", "C"),
        ("The answer is (A) or so. The answer is (C) then", "C"),
        ("The correct answer is **C**.", "C"),
        ("the answer is option C", "C"),
        ("Answer: C", "C"),
        ("The answer is C, and A is wrong", "C"),
        ("**Answer:** C", "C"),
        ("ANSWER: $C$", "C"),
        ("answer is C because of B", "C"),
        ("The correct option is C, not A", "C"),
        ("Therefore option C is correct.", "C"),
        ("The answer is A.", "A"),
        ("Answer: A\nIt is so.", "A"),
        ("Let me see.\n\n**C**", "C"),
        ("(C).\n", "C"),
        ("A is wrong\nC", "C"),
        ("<think>Answer: A</think>Answer: C", "C"),
    ],
)
def test_a_letter_that_is_chosen(completion, found):
    for letter in "ABCD":
        graded = grade.choice(completion, problem(letter))
        assert (graded.found, graded.correct) == (found, found == letter)


@pytest.mark.parametrize(
    "completion",
    [
        "A cat sat there.",
        "The answer is A cat",
        "The answer is Carbon",
        "The answer is C's",
        "The answer is B or C",
        "The answer is (B) or (C)",
        "Answer: A, B",
        "the answer is c",
        "We see that B follows from D",
        "<think>Answer: C",
        "\\boxed{",
        "\\boxed{}",
        "Answer: E",
        "",
    ],
)
def test_no_letter_is_chosen(completion):
    assert grade.choice(completion, problem("A")).found is None


def test_a_box_without_a_letter_is_wrong():
    for text in ("\\boxed{12}", "Answer: C \\boxed{Carbon}", "\\boxed{CD}", "\\boxed{A, B}"):
        assert not grade.choice(text, problem("C")).correct
    assert not grade.choice("\\boxed{A, B}", problem("A")).correct
    with pytest.raises(ValueError, match="A, B, C or D, got '12'"):
        grade.choice("\\boxed{C}", problem("12"))


@pytest.mark.parametrize(
    "text", [" ", "\n", "Answer: ", "Answer: " + " " * 100_000, "**", "```python\n", "\\boxed{", "<think>"]
)
@pytest.mark.parametrize("end", ["", "x", "</think>x"])
def test_a_long_completion_is_searched_in_time(text, end):
    completion = text * (200_000 // len(text)) + end
    start = time.monotonic()
    for search in (math_text.find, programs.block, lambda one: grade.choice(one, problem("A")).found):
        search(completion)
    assert time.monotonic() - start < 3


def test_exact_ignores_only_how_words_are_spaced():
    assert grade.exact(" a  b\nc ", problem("a b c")) == grade.Grade(True, " a  b\nc ")
    for completion in ("a b", "a b c d", "A b c", "ab c", ""):
        assert not grade.exact(completion, problem("a b c")).correct


def fenced(program, mark="python"):
    return f"Here:\n```{mark}\n{program}\n```\nDone."


SUM = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        (fenced("a = 1") + fenced("b = 2"), "b = 2\n"),
        (fenced("a = 1") + fenced("3", "text"), "a = 1\n"),
        (fenced("a = 1") + fenced("3", ""), "a = 1\n"),
        (fenced("a = 1", ""), "a = 1\n"),
        (fenced("a = 1", "Python3"), "a = 1\n"),
        (fenced("a = 1", "py"), "a = 1\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("```python\na = 1\n", None),
        ("```python\na = 1\n```python\nb = 2\n```", "b = 2\n"),
        (fenced("a = 1", "cpp"), None),
        ("print(1)", None),
    ],
)
def test_the_last_block_is_the_program(completion, found):
    assert programs.block(completion) == found


def test_a_program_has_to_pass_all_tests():
    wanted = coded(("1 2\n", "3\n"), ("4 5", "9"))
    assert grade.code(f"<think>{fenced('print(0)')}</think>{fenced(SUM)}", wanted).correct
    for wrong in ("print(3)", "print(input())", "1/0", "exit()", "while True: pass", "import os; os._exit(0)"):
        assert not grade.code(fenced(wrong), coded(("1 2", "3"), ("4 5", "9"), seconds=0.8)).correct
    assert grade.code(SUM, wanted) == grade.Grade(False, None)
    assert not grade.code(f"<think>{fenced(SUM)}", wanted).correct


def test_the_answer_and_then_an_endless_loop_or_an_error_is_wrong():
    for after in ("while True: pass", "raise SystemExit(1)"):
        program = f"print(3, flush=True)\n{after}"
        assert not grade.code(fenced(program), coded(("", "3"), seconds=0.8)).correct


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("1.0", "1", True),
        ("0.30000000000000004", "0.3", False),
        ("1e3", "1000", True),
        ("YES", "Yes", False),
        ("nan", "nan", True),
        ("sNaN", "1", False),
        ("1 a", "1.0 a", True),
        ("", "1", False),
        ("", "", True),
    ],
)
def test_lines_are_compared_by_words_and_decimal_values(output, expected, same):
    assert programs.same_output(output, expected) == same


def test_a_method_a_function_and_a_tuple_are_called_with_the_arguments():
    wanted = coded(("[1, 2]\n3", "[4, 5]"), ("[]\n1", "[]"), function="add")
    method = "class Solution:\n    def add(self, a: List[int], b: int) -> List[int]:\n        return [x + b for x in a]"
    function = "from __future__ import annotations\nprint('[4, 5]')\ndef add(a, b):\n    return tuple(x + b for x in a)"
    stdin = "import sys\ndef add(a, b): return [x + b for x in a]\nif __name__ == '__main__': print(sys.stdin.read())"
    for program in (method, function, stdin):
        assert grade.code(fenced(program), wanted).correct
    for program in (
        "def add(a, b): return a",
        "def other(): pass",
        "def add(a): return [4, 5]",
        "def add(a, b): return {4}",
    ):
        assert not grade.code(fenced(program), wanted).correct


CHEATS = {
    "prints it and leaves": "print('[61803, 27182]'); exit(0)",
    "leaves while it is called": "import os\ndef add(a, b):\n    print('[61803, 27182]', flush=True)\n    os._exit(0)",
    "reads the frames": """
        import gc, sys
        frame, seen = sys._getframe(), []
        while frame:
            seen.append(repr((frame.f_globals, frame.f_locals)))
            frame = frame.f_back
        seen += [one for one in gc.get_objects() if isinstance(one, str)] + sys.argv
        def add(a, b): return [61803, 27180 + b - 1] if any("61803, 2718" + str(2) in one for one in seen) else 0""",
    "reads other processes": """
        import os
        def add(a, b):
            for pid in os.listdir("/proc"):
                try:
                    if b"61803, 2718" + b"2" in open(f"/proc/{pid}/cmdline", "rb").read(): return [61803, 27182]
                except OSError: pass""",
    "is equal to everything": """
        class Always(list):
            def __eq__(self, other): return True
        def add(a, b): return Always()""",
    "changes json": "import json\njson.dumps = lambda value: 'true'\ndef add(a, b): return 1",
    "closes the output": "import os\ndef add(a, b):\n    os.closerange(0, 64)\n    return [61803, 27182]",
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_program_cannot_claim_success(cheat):
    wanted = coded(("[61800, 27179]\n3", "[61803, 27182]"), function="add")
    assert grade.code(fenced("def add(a, b): return [x + b for x in a]"), wanted).correct
    assert not grade.code(fenced(textwrap.dedent(cheat)), wanted).correct


def test_numpy_deep_recursion_and_missing_imports_work_in_a_program():
    for program in (
        "import numpy as np\nprint(np.array([1, 2]).sum())",
        "def f(n): return 0 if n == 0 else f(n - 1)\nprint(f(20_000) + 3)",
        "print(len(Counter('abc')) + int(sqrt(0)) + bisect.bisect([1], 0))",
        "import threading\nthreading.stack_size(1 << 26)\nthreading.Thread(target=print, args=(3,)).start()",
    ):
        assert grade.code(fenced(program), coded(("", "3"))).correct, program


@pytest.mark.parametrize(
    "answer", ["", "[]", "3", "{}", '{"tests": []}', '{"tests": [{"input": ""}]}', '{"tests": 3, "function": null}']
)
def test_tests_that_cannot_be_read_are_an_error(answer):
    with pytest.raises(ValueError, match="test"):
        grade.code(fenced("print(1)"), problem(answer))
