"""The generated problems, solved again by reading the prompt."""

import itertools

import pytest

from kvcomp.eval.chains import FAMILIES, WORDS

SEEDS = range(40)


def registers(prompt):
    """The chain of a register machine, from the words of its prompt."""
    rules, held, index, words = {}, {}, 2, []
    while not prompt[index + 1].isdigit():
        state, register, adds, constant, even, if_even, odd, if_odd = prompt[index : index + 8]
        assert (adds, even, odd) == (f"{state}+", f"{state}0", f"{state}1")
        rules[state] = (register, int(constant), (if_even, if_odd))
        index += 8
    while prompt[index] != "start":
        held[prompt[index]] = int(prompt[index + 1])
        index += 2
    following = prompt[index + 1]
    for _ in range(54):
        state = following.lower()
        named, constant, branches = rules[state]
        register = named.lower()
        old, new = held[register], (held[register] + constant) % 10
        held[register], following = new, branches[new % 2]
        words += [state, named, register, str(old), f"{state}+", f"+{constant}", register, str(new)]
        words += [f"{state}{new % 2}", following]
    return words


def derivations(prompt):
    """The chain of a walk over derived values, from the words of its prompt."""
    definitions, links, index, words = {}, {}, 2, []
    while prompt[index].endswith(">"):
        key, name, adds, constant = prompt[index : index + 4]
        assert key[:-1] == adds[:-1]
        definitions[key[:-1]] = (name, constant)
        index += 4
    while prompt[index] != "given":
        links[prompt[index]] = prompt[index + 1]
        index += 2
    name, value = prompt[index + 1 :]
    values = {name: int(value)}
    while name != "go":
        following, constant = definitions[name]
        values[following.lower()] = (values[name] + int(constant)) % 32
        words += [f"{name}>", following, f"{name}+", constant, following.lower(), str(values[following.lower()])]
        name = following.lower()
    total = values["go"]
    for _ in range(72):
        key = f"{name}{total % 2}"
        name = links[key].lower()
        words += [key, links[key], name, str(values[name]), str(total), str((total + values[name]) % 32)]
        total = (total + values[name]) % 32
    return words


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


def test_no_place_of_a_walk_comes_twice():
    for seed in SEEDS:
        walk = FAMILIES["derivations"](seed).chain[-72 * 6 :]
        assert len({(walk[index + 1], walk[index + 4]) for index in range(0, len(walk), 6)}) == 72


def test_no_machine_ends_in_a_small_circle():
    for seed in SEEDS:
        states = FAMILIES["registers"](seed).chain[::10][27:]
        assert len(states) == 27 and len(set(states)) >= 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_stands_nowhere_but_before_what_is_looked_up(family):
    """Behind a form of a name stands one kind of word, and but for the numbers always the same one."""
    for seed in SEEDS:
        words = [*FAMILIES[family](seed).prompt, *FAMILIES[family](seed).chain]
        behind = {}
        for word, following in itertools.pairwise(words):
            if word.rstrip("+>01").islower() and word not in ("start", "given") and word[0].isalpha():
                behind.setdefault(word, set()).add(following)
        behind = {word: found for word, found in behind.items() if word not in ("registers", "derivations")}
        assert len(behind) > 20
        for found in behind.values():
            assert len(found) == 1 or all(word.isdigit() for word in found)
