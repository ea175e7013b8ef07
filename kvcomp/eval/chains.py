"""Generated problems with one right chain of thought each, for small models: `registers` and `derivations`.

Both are written so that the rows really needed at any time fit in a quarter of the text, that facts of the prompt and
facts written on the way are read again at irregular distances, and that plain induction solves them: a fact is a key
and the word behind it. A key is one word that stands nowhere else, a form of a name: `a` before its register or value,
`a+` before its constant, `a>` before what is derived from it, `a0` and `a1` before what follows if a result is even or
odd; there other names are written large, `A`. All else is said by the last few words. The families differ in kind:
registers are overwritten all the time; derived values never change, stand among definitions that are used once and
distractors that are never used, and are restated when they are used.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

NAMES = [chr(ord("a") + i) for i in range(24)]
NUMBERS = [str(i) for i in range(32)]
CONSTANTS = [f"+{i}" for i in range(10)]
MARKS = ["registers", "derivations", "start", "given"]
FORMS = [form for name in [*NAMES, "go"] for form in (name, name.upper(), *(name + end for end in "+>01"))]
WORDS = ["<pad>", "<bos>", "<eos>", *NUMBERS, *CONSTANTS, *MARKS, *FORMS]
"""The whole vocabulary; words are separated by one space. `<bos>` begins a prompt. A chain is cut off after its steps:
a model that counts them attends to all rows evenly, and no small cache can keep those."""
TRAINING = 1_000_000
"""Seeds from here on are for training a model, those below for judging it."""


Rule: TypeAlias = tuple[str, int, str, str]
"""Register, constant, next state if the result is even, and if it is odd."""


@dataclass(frozen=True)
class Chain:
    """A problem: words of the prompt, and words of the only right chain of thought."""

    prompt: list[str]
    chain: list[str]


def registers(seed: int, steps: int = 54, rules: int = 10, count: int = 6) -> Chain:
    """A register machine of `rules` states (at most 10) and `count` registers modulo 10, run for `steps` steps.

    A rule is `state REGISTER state+ constant state0 STATE state1 STATE`; a step is `state REGISTER register old state+
    constant register new state0 STATE`, or `state1` after an odd result. No two rules have the same constant, and the
    last half of the chain visits half of the states at least.
    """
    draw = random.Random(f"registers {seed}")
    while True:
        names = draw.sample(NAMES, rules + count)
        states, held = names[:rules], {name: draw.randrange(10) for name in names[rules:]}
        table: dict[str, Rule] = {}
        for state, constant in zip(states, draw.sample(range(10), rules), strict=True):
            even, odd = draw.sample([other for other in states if other != state], 2)
            table[state] = (draw.choice(names[rules:]), constant, even, odd)
        start = draw.choice(states)
        chain = _run(table, dict(held), start, steps)
        if chain:
            break
    prompt = ["<bos>", "registers"]
    for name, (register, constant, even, odd) in table.items():
        prompt += [
            name,
            register.upper(),
            f"{name}+",
            f"+{constant}",
            f"{name}0",
            even.upper(),
            f"{name}1",
            odd.upper(),
        ]
    for register, value in held.items():
        prompt += [register, str(value)]
    return Chain([*prompt, "start", start.upper()], chain)


def _run(table: dict[str, Rule], held: dict[str, int], state: str, steps: int) -> list[str]:
    """The words of the chain; none if its last half visits fewer than half of the states."""
    chain, visited = [], []
    for _ in range(steps):
        register, constant, even, odd = table[state]
        old, new = held[register], (held[register] + constant) % 10
        following = odd if new % 2 else even
        chain += [state, register.upper(), register, str(old), f"{state}+", f"+{constant}", register, str(new)]
        chain += [f"{state}{new % 2}", following.upper()]
        visited.append(state)
        state, held[register] = following, new
    return chain if 2 * len(set(visited[steps // 2 :])) >= len(table) else []


def derivations(seed: int, steps: int = 72, count: int = 10, distractors: int = 5) -> Chain:
    """`count` values derived from one given value in dependency order, then a walk of `steps` steps over them.

    A definition is `name> NAME name+ constant`, in random order, among `distractors` whose base is never known; the
    last one leads to `go`. A link is `name0 NAME name1 NAME`. The chain first derives every value modulo 32, each step
    `name> NAME name+ constant name value`, then walks: a step is `name0 NAME name value total new`, or `name1` if the
    last total was odd, where `new = total + value` modulo 32. No pair of name and total comes twice.
    """
    draw = random.Random(f"derivations {seed}")
    while True:
        names = draw.sample(NAMES, count + 2 * distractors)
        known, unknown = names[:count], names[count:]
        value = {known[0]: draw.randrange(32)}
        constants = [draw.randrange(1, 5) for _ in known]
        for base, name, constant in zip(known, [*known[1:], "go"], constants, strict=True):
            value[name] = (value[base] + constant) % 32
        links = {name: draw.sample(known, 2) for name in [*known, "go"]}
        walk = _walk(value, links, steps)
        if walk:
            break
    defined = list(zip(known, constants, [*known[1:], "go"], strict=True))
    useless = [(base, draw.randrange(1, 5), name) for base, name in zip(unknown[::2], unknown[1::2], strict=True)]
    prompt = ["<bos>", "derivations"]
    for base, constant, name in draw.sample(defined + useless, count + distractors):
        prompt += [f"{base}>", name.upper(), f"{base}+", f"+{constant}"]
    for name, (even, odd) in draw.sample(list(links.items()), len(links)):
        prompt += [f"{name}0", even.upper(), f"{name}1", odd.upper()]
    prompt += ["given", known[0], str(value[known[0]])]
    chain = []
    for base, constant, name in defined:
        chain += [f"{base}>", name.upper(), f"{base}+", f"+{constant}", name, str(value[name])]
    return Chain(prompt, [*chain, *walk])


def _walk(value: dict[str, int], links: dict[str, list[str]], steps: int) -> list[str]:
    """The words of the walk, or none if it comes back to where it was."""
    name, total = "go", value["go"]
    seen, words = set(), []
    for _ in range(steps):
        following = links[name][total % 2]
        if (following, total) in seen:
            return []
        seen.add((following, total))
        new = (total + value[following]) % 32
        words += [f"{name}{total % 2}", following.upper(), following, str(value[following]), str(total), str(new)]
        name, total = following, new
    return words


FAMILIES = {"registers": registers, "derivations": derivations}
"""The families by name; each is called with a seed."""
