"""Answers as text: where a completion has its final answer, and one way to write the same."""

from __future__ import annotations

import re

_BOX = "\\boxed{"
_GSM8K = re.compile(r"^####[ \t]*(\S*\d\S*)[ \t]*$", re.MULTILINE)
_PHRASE = re.compile(r"\banswers?\**(?:\s+(?:is|are)\b\s*:?|\s*[:=])[\s*]*", re.IGNORECASE)
_FORMULA = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:(?:,|\{,\})(?:\\!)?|\\[,!; ]|[ ~])\d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d*)?)[eE]([-+]?\d+)")
_MIXED = re.compile(r"([-+]?\d+)(?:\s|~|\\[, ])+(\d+)/(\d+)")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
_UNIT = re.compile(r"([-+]?\d[\d.,/]*)\s*[A-Za-z]{2}[A-Za-z ]*")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_BASE = re.compile(r"\w+_\{?(\d+)\}?")


def thought(completion: str) -> str | None:
    """The part after the thinking: after the last `</think>`, or all if there is no thinking; None if it never ends."""
    before, closed, after = completion.rpartition("</think>")
    if "<think>" in after:
        return None
    return after if closed else completion


def find(completion: str) -> str | None:
    """The final answer in a completion as it stands there, or None.

    After the thinking, the first of these that there is: what is in the `\\boxed{}` that opens last, nothing if it
    does not close; the number after the last `####`, as in GSM8K; what follows the last "answer is", "answer:" or
    "answer =" in its line, the formula if it begins with one, else up to the end of the sentence. Nothing else counts:
    the last number of an unfinished solution is not an answer.
    """
    text = thought(completion)
    if text is None:
        return None
    if _BOX in text:
        return boxed(text)
    if numbers := _GSM8K.findall(text):
        return str(numbers[-1])
    end = max((match.end() for match in _PHRASE.finditer(text)), default=None)
    if end is None:
        return None
    if formula := _FORMULA.match(text, end):
        return next(filter(None, formula.groups())).strip()
    line = text[end:].partition("\n")[0]
    return re.split(r"\.(?:\s|\**$)", line)[0].strip(" *") or None


def boxed(text: str) -> str | None:
    """What is in the `\\boxed{}` that opens last; None if there is none, or it does not close, or it is empty."""
    start, depth = text.rfind(_BOX), 0
    if start < 0:
        return None
    inner = start + len(_BOX)
    for match in re.finditer(r"\\.|[{}]", text[inner - 1 :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[inner : inner - 1 + match.start()].strip() or None
    return None


def tidy(answer: str, units: bool = False) -> str:
    """The answer without what makes no difference, as math-verify understands it.

    Dollars, a final period and spaces around it go. Digits in groups of three are one number, with `,`, `{,}`, `\\,`,
    `\\!`, `~` or a space between them: `1,000` and also `100,200`; `100, 200` is a list. `1.2e3` is `1.2\\times10^{3}`,
    `3 1/2` is `3\\frac{1}{2}`, `0.\\overline{3}` is `\\frac{3}{9}`, `a\\pm b` is `a+b, a-b`. With `units`, words
    after a number go too; math-verify ignores those in `\\text{}`.
    """
    text = re.sub(r"\\?\$", "", answer).strip()
    text = re.sub(r"(?<!\\)\.$", "", text).strip()
    if _GROUPED.fullmatch(text):
        text = re.sub(r"[^\d.+-]", "", text)
    if scientific := _SCIENTIFIC.fullmatch(text):
        text = f"{scientific[1]}\\times10^{{{int(scientific[2])}}}"
    if repeating := _REPEATING.fullmatch(text):
        text = _fraction(*repeating.groups())
    if "\\pm" in text or "±" in text:
        text = text.replace("±", "\\pm ")
        signs = (("+", "-"), ("-", "+"))
        text = ", ".join(text.replace("\\pm", pm).replace("\\mp", mp) for pm, mp in signs)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text) if _MIXED.fullmatch(text) else text
    unit = _UNIT.fullmatch(text) if units else None
    return unit[1] if unit else text


def _fraction(sign: str, whole: str, fixed: str, repeated: str) -> str:
    """A repeating decimal as a fraction."""
    denominator = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    numerator = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return f"{sign}\\frac{{{numerator}}}{{{denominator}}}"


def words(text: str) -> str:
    """The text without `\\text{}` and the like, without spaces and sizes, with one kind of fraction: to compare it."""
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    text = re.sub(r"(?:\\[,!;: ]|~|\s)+", " ", text)
    return re.sub(r"(?<!\d) | (?!\d)", "", text)  # `3 1/2` is not `31/2`


def bases(text: str) -> str:
    """The base of a numeral such as `2516_8` or `4B_{12}`; "" if it has none."""
    match = _BASE.fullmatch(text)
    return match[1] if match else ""
