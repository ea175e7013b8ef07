"""Generated problems with one right chain of thought each, for small models: `registers` and `derivations`.

Both are written so that the rows really needed at any time fit in a quarter of the text, that facts of the prompt and
facts written on the way are read again at irregular distances, and that every token that must be looked up stands right
behind a copy of its key, one word: a name before its constant or value, `a>` before what is derived from it, `a0` and
`a1` before what follows if a result is even or odd. They differ in kind: registers are overwritten all the time;
derived values never change, stand among definitions that are used once and distractors that are never used, and are
restated when they are used.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

NAMES = [chr(ord("a") + i) for i in range(24)]
NUMBERS = [str(i) for i in range(32)]
CONSTANTS = [f"+{i}" for i in range(10)]
COUNTERS = [f"#{i}" for i in range(10)]
MARKS = ["registers", "derivations", "start", "given", "carry"]
FORMS = [name + end for name in [*NAMES, "go"] for end in ("", ">", "0", "1")]
WORDS = ["<pad>", "<bos>", "<eos>", *FORMS, *NUMBERS, *CONSTANTS, *COUNTERS, *MARKS]
"""The whole vocabulary; words are separated by one space. `<bos>` begins a prompt. A chain is cut off
where the shortest one ends. Steps are counted modulo 10: a model that had to count them all read rows far back for it,
which no method keeps."""
TRAINING = 1_000_000
"""Seeds from here on are for training a model, those below for judging it."""


Rule: TypeAlias = tuple[str, int, str, str]
"""Register, constant, next state if the result is even, and if it is odd."""


@dataclass(frozen=True)
class Chain:
    """A problem: words of the prompt, and words of the only right chain of thought."""

    prompt: list[str]
    chain: list[str]


def registers(seed: int, steps: int = 66, rules: int = 10, count: int = 6) -> Chain:
    """A register machine of `rules` states (at most 10) and `count` registers modulo 10, run for `steps` steps.

    A rule is `state constant register state0 state state1 state`; a step is `state constant register old #step register
    new state0`, or `state1` if the new value is odd, with `carry` after a new value that wrapped. No two rules have the
    same constant, and the last half of the chain visits half of the states at least.
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
        prompt += [name, f"+{constant}", register, f"{name}0", even, f"{name}1", odd]
    for register, value in held.items():
        prompt += [register, str(value)]
    return Chain([*prompt, "start", start], chain[1 : 8 * steps])


def _run(table: dict[str, Rule], held: dict[str, int], state: str, steps: int) -> list[str]:
    """The words of the chain; none if its last half visits fewer than half of the states."""
    chain, visited = [], []
    for step in range(steps):
        register, constant, even, odd = table[state]
        old, new = held[register], (held[register] + constant) % 10
        chain += [state, f"+{constant}", register, str(old), f"#{step % 10}", register, str(new)]
        chain += [*_carry(old + constant, 10), f"{state}{new % 2}"]
        visited.append(state)
        state, held[register] = (odd if new % 2 else even), new
    return chain if 2 * len(set(visited[steps // 2 :])) >= len(table) else []


def derivations(seed: int, steps: int = 76, count: int = 10, distractors: int = 5) -> Chain:
    """`count` values derived from one given value in dependency order, then a walk of `steps` steps over them.

    A definition is `name> name constant`, in random order, among `distractors` whose base is never known; the last one
    leads to `go`. A link is `name0 name name1 name`. The chain first derives every value modulo 32, each step `name>
    name constant name value`, then walks: a step is `name value #step total new name0`, or `name1` if the new total is
    odd, `carry` as above, where `new = total + value` modulo 32. No pair of name and total comes twice.
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
        prompt += [f"{base}>", name, f"+{constant}"]
    for name, (even, odd) in draw.sample(list(links.items()), len(links)):
        prompt += [f"{name}0", even, f"{name}1", odd]
    prompt += ["given", known[0], str(value[known[0]])]
    chain = []
    for base, constant, name in defined:
        chain += [f"{base}>", name, f"+{constant}", name, str(value[name])]
    chain += [f"go{value['go'] % 2}", *walk]
    return Chain(prompt, chain[: 5 * count + 6 * steps])


def _carry(total: int, modulus: int) -> list[str]:
    """A word more where a sum wraps: steps of different lengths, so that nothing is found by counting words back."""
    return ["carry"] if total >= modulus else []


def _walk(value: dict[str, int], links: dict[str, list[str]], steps: int) -> list[str]:
    """The words of the walk, or none if it comes back to where it was."""
    total, name = value["go"], links["go"][value["go"] % 2]
    seen, words = set(), []
    for step in range(steps):
        if (name, total) in seen:
            return []
        seen.add((name, total))
        new = (total + value[name]) % 32
        words += [name, str(value[name]), f"#{step % 10}", str(total), str(new)]
        words += [*_carry(total + value[name], 32), f"{name}{new % 2}"]
        total, name = new, links[name][new % 2]
    return words


FAMILIES = {"registers": registers, "derivations": derivations}
"""The families by name; each is called with a seed."""
