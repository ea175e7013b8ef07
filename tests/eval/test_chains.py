"""The generated problems, solved again by reading the prompt."""

import pytest

from kvcomp.eval.chains import FAMILIES, WORDS

SEEDS = range(40)


def registers(prompt):
    """The chain of a register machine, from the words of its prompt."""
    rules, held, index = {}, {}, 2
    while prompt[index + 1].startswith("+"):
        state, constant, register, even, if_even, odd, if_odd = prompt[index : index + 7]
        assert (f"{state}0", f"{state}1") == (even, odd)
        rules[state] = (register, int(constant), (if_even, if_odd))
        index += 7
    while prompt[index] != "start":
        held[prompt[index]] = int(prompt[index + 1])
        index += 2
    state = prompt[index + 1]
    words = [state]
    for step in range(66):
        register, constant, following = rules[state]
        new = (held[register] + constant) % 10
        words += [f"+{constant}", register, str(held[register]), f"#{step % 10}", register, str(new)]
        words += ["carry"] * (held[register] + int(constant) > 9) + [f"{state}{new % 2}"]
        held[register], state = new, following[new % 2]
        words.append(state)
    return words[1 : 8 * 66]


def derivations(prompt):
    """The chain of a walk over derived values, from the words of its prompt."""
    definitions, links, index = {}, {}, 2
    while prompt[index].endswith(">"):
        key, name, constant = prompt[index : index + 3]
        definitions[key[:-1]] = (name, constant)
        index += 3
    while prompt[index] != "given":
        links[prompt[index]] = prompt[index + 1]
        index += 2
    name, value = prompt[index + 1 :]
    values, words = {name: int(value)}, []
    while name != "go":
        following, constant = definitions[name]
        values[following] = (values[name] + int(constant)) % 32
        words += [f"{name}>", following, constant, following, str(values[following])]
        name = following
    total = values["go"]
    words.append(f"go{total % 2}")
    for step in range(76):
        name = links[words[-1]]
        new = (total + values[name]) % 32
        words += [name, str(values[name]), f"#{step % 10}", str(total), str(new)]
        words += ["carry"] * (total + values[name] > 31) + [f"{name}{new % 2}"]
        total = new
    return words[: 5 * 10 + 6 * 76]


SOLVERS = {"registers": registers, "derivations": derivations}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chain_follows_from_the_prompt(family):
    for seed in SEEDS:
        problem = FAMILIES[family](seed)
        assert SOLVERS[family](problem.prompt) == problem.chain


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_family_are_equally_long_and_words_known(family):
    problems = [FAMILIES[family](seed) for seed in SEEDS]
    assert len({len(one.prompt) for one in problems}) == 1
    assert len({len(one.chain) for one in problems}) == 1
    assert {word for one in problems for word in one.prompt + one.chain} <= set(WORDS)
    assert len({tuple(one.prompt) for one in problems}) == len(SEEDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_problem_in_every_process(family):
    assert FAMILIES[family](7) == FAMILIES[family](7)
    start = {"registers": "<bos> registers", "derivations": "<bos> derivations"}[family]
    assert " ".join(FAMILIES[family](7).prompt).startswith(start)


def steps(chain):
    """The indices of the counters of a chain."""
    return [index for index, word in enumerate(chain) if word.startswith("#")]


def test_no_place_of_a_walk_comes_twice():
    for seed in SEEDS:
        chain = FAMILIES["derivations"](seed).chain
        places = [(chain[index - 2], chain[index + 1]) for index in steps(chain) if index + 1 < len(chain)]
        assert len(set(places)) == len(places) > 55


def test_no_machine_ends_in_a_small_circle():
    for seed in SEEDS:
        chain = FAMILIES["registers"](seed).chain
        states = [chain[index - 4] for index in steps(chain)][31:]
        assert len(states) > 22 and len(set(states)) >= 5
