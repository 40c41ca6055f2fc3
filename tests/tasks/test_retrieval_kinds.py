"""Each kind of sequence is read by a solver that sees the tokens alone and knows the format from the documentation, not
from the generator.
"""

from collections import Counter

import numpy as np
import pytest

from zonal.errors import ArgumentError
from zonal.tasks.retrieval import KINDS, Words, check, example

WORDS = Words(128)
SIGNS = {sign: token for token, sign in enumerate("?:>=[]#")}
SHAPES = [
    (kind, pairs, KINDS[kind].size(pairs) + room)
    for kind in KINDS
    for pairs in (1, 3, 8)
    for room in (0, 1, 30)
    if not (kind.startswith("offset") and pairs < 8)
]


def is_key(token):
    return token in WORDS.keys


def pairs_in(tokens):
    """Left to right: a key and what follows it."""
    found, at = {}, 0
    while at < len(tokens):
        if is_key(tokens[at]):
            found[tokens[at]] = tokens[at + 1]
            at += 1
        at += 1
    return found


def economy(context):
    """(agent, resource) → how much of it is left."""
    counts = Counter()
    for actor, sign, first, second in zip(*(context[at::4] for at in range(4)), strict=False):
        if sign == SIGNS[":"]:
            counts[actor, first] += second - WORDS.values.start
        elif sign == SIGNS[">"]:
            counts.update({(actor, second): -1, (first, second): 1})
        elif sign == SIGNS["#"]:
            counts.update({(actor, first): -1, (actor, second): -1})
    return counts


def answers(kind, tokens):
    """Position → answer, for every question that is asked in the tokens."""
    start = tokens.index(SIGNS["?"])
    context, rest = tokens[:start], tokens[start:]
    asked = []  # (last position of the question, what it names)
    for at, token in enumerate(rest):
        if token == SIGNS["?"]:
            stop = rest.index(SIGNS["="], at) if kind in ("tool-trace", "economy") else at + 1
            asked.append((start + stop, rest[at + 1 : stop + 1]))
    if kind == "tool-trace":
        calls = {
            (context[at - 1], context[at + 1]): context[at + 3]
            for at, token in enumerate(context)
            if token == SIGNS[":"]
        }
        return {at: calls[name[0], name[2]] for at, name in asked}
    if kind == "economy":
        counts = economy(context)
        return {at: WORDS.values.start + counts[name[0], name[1]] for at, name in asked}
    if kind.startswith("common"):
        sign = asked[0][1][-1]
        assert (sign == SIGNS["#"]) == (kind == "common-word")
        counted = Counter(context[at + 1] for at, token in enumerate(context) if token == sign).most_common(2)
        assert len(counted) == 1 or counted[0][1] > counted[1][1]
        return {at: counted[0][0] for at, _ in asked}
    if kind.startswith("offset-"):
        listed = [token for token in context if token not in WORDS.noise]
        return {at: listed[listed.index(name[0]) + int(kind[-1])] for at, name in asked}
    if kind.startswith("system-prompt"):
        context = context[context.index(SIGNS["["]) + 1 : context.index(SIGNS["]"])]
    facts = pairs_in(context)
    if kind == "two-hop":
        return {at: facts[facts[name[0]]] for at, name in asked}
    if kind == "two-hop-written":
        assert facts[asked[0][1][0]] == asked[1][1][0]
        return {at: facts[name[0]] for at, name in asked[1:]}
    return {at: facts[name[0]] for at, name in asked}


@pytest.mark.parametrize(("kind", "pairs", "length"), SHAPES)
def test_the_tokens_hold_the_answers(kind, pairs, length):
    check(kind, pairs, length, WORDS)
    for number in range(20):
        tokens, targets = example(kind, pairs, length, WORDS, (number,))
        assert tokens.shape == targets.shape == (length,)
        wanted = {at: int(targets[at]) for at in np.flatnonzero(targets != -100)}
        assert answers(kind, tokens.tolist()) == wanted
        # an answer that is not the last stands after its question
        assert all(at + 1 == length or tokens[at + 1] == answer for at, answer in wanted.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_solver_notices_a_wrong_sequence(kind):
    """With the words of the context moved on by one place among themselves, some answer is another."""
    pairs, wrong = 8, 0
    for number in range(20):
        tokens, targets = example(kind, pairs, KINDS[kind].size(pairs) + 10, WORDS, (number,))
        stop = tokens.tolist().index(SIGNS["?"])
        places = [
            at for at in range(stop) if tokens[at] in WORDS.values or (kind.startswith("offset") and is_key(tokens[at]))
        ]
        if kind.startswith("offset"):
            asked = int(np.flatnonzero(tokens[:stop] == tokens[stop + 1])[0])
            places.remove(asked)  # it stays, and what stands after it moves
        if kind.startswith("common"):  # which of the words is common
            tokens[places] = WORDS.values.start + (tokens[places] - WORDS.values.start + 1) % len(WORDS.values)
        else:
            tokens[places] = np.roll(tokens[places], 1)
        wrong += answers(kind, tokens.tolist()) != {at: int(targets[at]) for at in np.flatnonzero(targets != -100)}
    # a roll may bring an equal value
    assert wrong >= 15


def test_how_many_are_asked():
    asked = {kind: sum(example(kind, 8, 128, WORDS, (0,))[1] != -100) for kind in KINDS}
    assert asked == {
        "economy": 4,
        "mqar": 8, "system-prompt": 4, "system-prompt-distractors": 4, "tool-trace": 4, "needle": 1, "two-hop": 1,
        "two-hop-written": 1, "common-word": 1, "common-value": 1,
        **{f"offset-{j}": 1 for j in range(1, 5)},
    }  # fmt: skip


def test_needles_lie_at_any_depth():
    depths = [
        int(np.flatnonzero([is_key(token) for token in example("needle", 1, 64, WORDS, (number,))[0]])[0])
        for number in range(400)
    ]
    assert (min(depths), max(depths)) == (0, 60)
    assert np.histogram(depths, 4, (0, 61))[0].min() > 70


def test_in_a_trace_neither_agent_nor_tool_is_enough():
    ambiguous = 0
    for number in range(50):
        tokens = example("tool-trace", 8, 80, WORDS, (number,))[0].tolist()
        context = tokens[: tokens.index(SIGNS["?"])]
        calls = [(context[at - 1], context[at + 1]) for at, token in enumerate(context) if token == SIGNS[":"]]
        assert len(set(calls)) == len(calls) == 8
        ambiguous += len({agent for agent, _ in calls}) < 8 and len({tool for _, tool in calls}) < 8
    assert ambiguous == 50


@pytest.mark.parametrize(
    "kind",
    [
        "mqar",
        "needle",
        "two-hop",
        "common-word",
        "common-value",
        "tool-trace",
        "system-prompt",
        "system-prompt-distractors",
    ],
)
def test_a_guess_is_right_as_often_as_said(kind):
    """Naming the value that stands in the context most often, less those that followed earlier questions; of a list
    whose most frequent word is asked, any word.
    """
    stream, right, pairs = np.random.default_rng(0), [], 4
    for number in range(1500):
        tokens, targets = example(kind, pairs, 64, WORDS, (number,))
        asked_of = SIGNS["]" if kind.startswith("system") else "?"]  # what stands behind a prompt is no answer
        context = tokens[: tokens.tolist().index(asked_of)]
        offered = context[np.isin(context, list(WORDS.values))].tolist()
        for at in np.flatnonzero(targets != -100):
            counts = {value: offered.count(value) for value in offered}
            often = [value for value in offered if counts[value] == max(counts.values()) or "common" in kind]
            right.append(stream.choice(often) == targets[at])
            offered.remove(targets[at])
    assert np.mean(right) == pytest.approx(KINDS[kind].guess(pairs, WORDS), abs=0.025)


def test_values_that_stand_twice_make_a_guess_easier():
    few, many = Words(32), Words(4096)
    assert KINDS["needle"].guess(16, many) == pytest.approx(1 / 16, rel=0.1)
    assert KINDS["needle"].guess(16, few) > 2 / 16
    assert KINDS["mqar"].guess(4, many) == pytest.approx((1 / 4 + 1 / 3 + 1 / 2 + 1) / 4, abs=0.005)


@pytest.mark.parametrize("offset", [1, 4])
def test_the_first_words_of_an_offset_are_never_its_answer(offset):
    answers = set()
    for number in range(300):
        tokens, targets = example(f"offset-{offset}", 6, 64, WORDS, (number,))
        context = tokens[: tokens.tolist().index(SIGNS["?"])].tolist()[-6:]
        answers |= {context.index(targets[at]) for at in np.flatnonzero(targets != -100)}
    assert answers == set(range(offset, 6))
    assert KINDS[f"offset-{offset}"].guess(6, WORDS) == 1 / len(answers)


def test_words():
    assert len(WORDS.noise) + len(WORDS.keys) + len(WORDS.values) + len(SIGNS) == 128
    assert (len(WORDS.keys), len(WORDS.values), len(WORDS.noise)) == (53, 53, 15)
    assert [*WORDS.agents, *WORDS.tools] == [*WORDS.keys]
    assert [WORDS.name(token) for token in (0, 7, WORDS.keys[3], WORDS.values[5])] == ["?", "·", "k3", "v5"]


@pytest.mark.parametrize(
    ("kind", "pairs", "length", "words"),
    [
        ("needle", 0, 64, "at least 1 pair"),
        ("needle", 54, 400, "needle with 54 pairs requires 54 keys, a vocabulary of 128 has 53"),
        ("common-word", 54, 400, "requires 54 values"),
        ("mqar", 8, 38, "mqar with 8 pairs takes 39 tokens; a length of that or more is required, got 38"),
        ("offset-3", 4, 64, "offset-3 requires at least 5 words, of which two can be asked, got 4"),
    ],
)
def test_what_cannot_be_made(kind, pairs, length, words):
    with pytest.raises(ArgumentError, match=words):
        check(kind, pairs, length, WORDS)
    with pytest.raises(ArgumentError, match="at least 32 tokens"):
        Words(31)
