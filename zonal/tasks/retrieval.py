"""Retrieval from a context of facts and noise, in one small vocabulary, so that a model trained on some kinds can be
asked others.

    fact       k v               a key, then its value
    call       a : t > r         an agent, its tool, the result
    question   ? k, ? a : t =    the answer is named at the last token of a question, and follows it when there are
                                 more questions

A sequence has exactly ``length`` tokens and ends with its questions; what facts and questions leave is noise, words
that mean nothing. ``pairs`` is the number of things to remember. The kinds:

    mqar                        k1 v1 k2 v2 · · · · ? k2 v2 ? k1
        every key is asked, after a gap of length - 5 pairs + 1
    system-prompt               [ k1 v1 k2 v2 ] · · · · ? k2 v2 ? k1
        up to four questions
    system-prompt-distractors   [ k1 v1 k2 v2 ] · k8 v5 · · k9 v3 ? k2 v2 ? k1
        as many assignments of other keys among the noise
    tool-trace                  a1 : t1 > r1 · a1 : t2 > r2 · ? a1 : t2 =
        agents and tools come again; up to four questions
    economy                     a : g 2  b : w 3  a > b g  b # g w · · ? a g = 1 ? b w =
        agents mine, give one to another, build from one of each; up to four counts, from 0 to 9, are asked
    needle                      · · k1 v1 · k2 v2 · · ? k1
        facts at any depth, one question
    two-hop                     · b c · d e · a b · f d ? a
        pairs chains, the answer is c
    two-hop-written             the same, ending with ? a b ? b
        the first hop is written out, the second is asked
    common-word                 # w · # u · # w · # w ? #
        w stands three times, pairs - 1 other words once
    common-value                k w · k u · k w · k w ? k
        as common-word, with a key in the place of #
    offset-j                    x1 x2 x3 x4 x5 … ? x2
        pairs different words without noise; the answer stands j after

What is whose: the Echo paper states "Agent:Tool→Result", "?Agent:Tool=", four or six system variables before a noisy
scratchpad or "confusing distractors", two hops, agents that
"mine, trade, and build with gold and wood", a vocabulary of 128, and one to eight pairs; no other format. Pairs
side by side and the answer named at the key are zoology's. Needles with several keys, chains of names that lead to a
value (variable tracking) and words that stand more often than others (common words) follow the tasks of these names in
RULER (Hsieh et al., 2024), in tokens instead of sentences. offset-j is this project's.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from zonal.errors import ArgumentError
from zonal.tasks.counts import largest
from zonal.tasks.task import IGNORED, stream

MARKERS = "?:>=[]#"
MOST_QUESTIONS = 4
MOST_COMMON = 3
OFFSETS = (1, 2, 3, 4)
MOST_OF_A_RESOURCE = 9
MOST_MINED = 3
LEAST_VOCABULARY = 32
_DRAWS = 500
"""Sequences by which a guess is estimated."""

T = TypeVar("T")
Question = tuple[list[int], int]
"""Its tokens and its answer."""


@dataclass(frozen=True)
class Words:
    """Which of ``size`` tokens are what: markers first, then about an eighth of noise, then keys, then as many values.

    Agents are the first quarter of the keys, tools the rest. Raises: ArgumentError when size < 32.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < LEAST_VOCABULARY:
            raise ArgumentError(
                f"Retrieval: a vocabulary of at least {LEAST_VOCABULARY} tokens is required, got {self.size}."
            )

    @property
    def keys(self) -> range:
        return range(self.size - 2 * self._kept, self.size - self._kept)

    @property
    def values(self) -> range:
        return range(self.size - self._kept, self.size)

    @property
    def noise(self) -> range:
        return range(len(MARKERS), self.size - 2 * self._kept)

    @property
    def agents(self) -> range:
        return self.keys[: len(self.keys) // 4]

    @property
    def tools(self) -> range:
        return self.keys[len(self.keys) // 4 :]

    @property
    def _kept(self) -> int:
        left = self.size - len(MARKERS)
        return (left - left // 8) // 2

    def name(self, token: int) -> str:
        """?, :, … for markers, · for noise, k3 for the key and v3 for the value with that number."""
        if token < len(MARKERS):
            return MARKERS[token]
        if token in self.keys:
            return f"k{token - self.keys.start}"
        return f"v{token - self.values.start}" if token in self.values else "·"


@dataclass(frozen=True)
class Draw:
    """Random parts of one sequence."""

    stream: np.random.Generator
    words: Words

    def some(self, choices: range, count: int) -> list[int]:
        """``count`` different ones."""
        return (choices.start + self.stream.permutation(len(choices))[:count]).tolist()

    def any(self, choices: range, count: int) -> list[int]:
        """``count`` of them, each any."""
        return self.stream.integers(choices.start, choices.stop, count).tolist()

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return [items[place] for place in self.stream.permutation(len(items))]

    def among_noise(self, blocks: Sequence[list[int]], length: int) -> list[int]:
        """The blocks in their order at places drawn evenly, ``length`` tokens in all; the rest is noise."""
        noise = self.any(self.words.noise, length - sum(map(len, blocks)))
        cuts = np.sort(self.stream.integers(0, len(noise) + 1, len(blocks))).tolist()
        found: list[int] = []
        for block, begin, end in zip(blocks, [0, *cuts], cuts, strict=False):
            found += noise[begin:end]
            found += block
        return found + noise[cuts[-1] if cuts else 0 :]


def mark(sign: str) -> int:
    """The token of a marker."""
    return MARKERS.index(sign)


@dataclass(frozen=True)
class Kind:
    """One kind of sequence.

    about: one line. size: tokens that facts and questions of so many pairs take, without noise. compose: (draw, pairs,
    length) → the context, of the length that the questions leave, and the questions. needs: distinct keys and distinct
    values that must exist for so many pairs.
    guess: (pairs, words) → the accuracy of a model that does not bind values to keys. It names the most frequent value
    of the context, after taking out the answers to earlier questions. Where the most frequent word is the answer, it
    names any word of the list; in an economy, always the most frequent count.
    """

    about: str
    size: Callable[[int], int]
    compose: Callable[[Draw, int, int], tuple[list[int], list[Question]]]
    needs: Callable[[int], tuple[int, int]]
    guess: Callable[[int, Words], float]


def _facts(draw: Draw, pairs: int) -> list[tuple[int, int]]:
    return list(zip(draw.some(draw.words.keys, pairs), draw.any(draw.words.values, pairs), strict=True))


def _asked(facts: Sequence[tuple[int, int]]) -> list[Question]:
    return [([mark("?"), key], value) for key, value in facts]


def _tokens(questions: Sequence[Question]) -> int:
    """Questions and the answers between them; the last answer would come after the end."""
    return sum(len(words) + 1 for words, _ in questions) - 1


def _mqar(draw: Draw, pairs: int, length: int) -> tuple[list[int], list[Question]]:
    facts = _facts(draw, pairs)
    questions = _asked(draw.shuffled(facts))
    context = [token for fact in facts for token in fact]
    return context + draw.any(draw.words.noise, length - len(context) - _tokens(questions)), questions


def _system_prompt(draw: Draw, pairs: int, length: int, distractors: bool) -> tuple[list[int], list[Question]]:
    facts = _facts(draw, 2 * pairs if distractors else pairs)
    facts, others = facts[:pairs], facts[pairs:]
    questions = _asked(draw.shuffled(facts)[:MOST_QUESTIONS])
    prompt = [mark("["), *(token for fact in facts for token in fact), mark("]")]
    return prompt + draw.among_noise(
        [list(fact) for fact in others], length - len(prompt) - _tokens(questions)
    ), questions


def _side(pairs: int) -> int:
    """Agents, and tools, of a trace: few, so that neither alone names a call."""
    return math.ceil(math.sqrt(2 * pairs)) if pairs > 1 else 1


def _tool_trace(draw: Draw, pairs: int, length: int) -> tuple[list[int], list[Question]]:
    side = _side(pairs)
    agents, tools = draw.some(draw.words.agents, side), draw.some(draw.words.tools, side)
    places = draw.some(range(side * side), pairs)
    results = draw.any(draw.words.values, pairs)
    calls = [
        ([agents[place // side], mark(":"), tools[place % side]], result)
        for place, result in zip(places, results, strict=True)
    ]
    questions: list[Question] = [
        ([mark("?"), *call, mark("=")], result) for call, result in draw.shuffled(calls)[:MOST_QUESTIONS]
    ]
    return draw.among_noise(
        [[*call, mark(">"), result] for call, result in calls], length - _tokens(questions)
    ), questions


def _agents(events: int) -> int:
    """Three agents in a short economy, six in a long one, as in the Echo paper's appendix G."""
    return 3 if events <= 15 else 6


def _economy(draw: Draw, pairs: int, length: int) -> tuple[list[int], list[Question]]:
    agents, resources = draw.some(draw.words.agents, _agents(pairs)), draw.some(draw.words.tools, 2)
    counts = {(agent, resource): 0 for agent in agents for resource in resources}
    changed: set[tuple[int, int]] = set()
    number = draw.words.values.start
    context: list[int] = []
    while len(context) < 4 * pairs:
        agent, other = (agents[place] for place in draw.stream.permutation(len(agents))[:2])
        resource = resources[draw.stream.integers(2)]
        action, amount = draw.stream.integers(3), int(draw.stream.integers(1, MOST_MINED + 1))
        if action == 0 and counts[agent, resource] + amount <= MOST_OF_A_RESOURCE:
            counts[agent, resource] += amount
            changed.add((agent, resource))
            context += [agent, mark(":"), resource, number + amount]
        elif action == 1 and counts[agent, resource] > 0 and counts[other, resource] < MOST_OF_A_RESOURCE:
            counts[agent, resource] -= 1
            counts[other, resource] += 1
            changed.add((other, resource))
            context += [agent, mark(">"), other, resource]
        elif action == 2 and all(counts[agent, each] > 0 for each in resources):
            for each in resources:
                counts[agent, each] -= 1
            context += [agent, mark("#"), *resources]
    # counts that never changed are asked only where there are too few others
    asked = sorted(draw.shuffled(list(counts)), key=lambda each: each not in changed)[: _questions(pairs)]
    questions: list[Question] = [
        ([mark("?"), agent, resource, mark("=")], number + counts[agent, resource]) for agent, resource in asked
    ]
    return context + draw.any(draw.words.noise, length - len(context) - _tokens(questions)), questions


def _economy_guess(pairs: int, words: Words) -> float:
    """The share of the most frequent count. With few events the amount that was last mined of the resource is right
    more often: with 4, 0.41 instead of 0.29.
    """
    found: Counter[int] = Counter()
    for number in range(_DRAWS):
        questions = _economy(Draw(stream(number), words), pairs, _economy_size(pairs))[1]
        found.update(answer for _, answer in questions)
    return max(found.values()) / found.total()


def _economy_size(pairs: int) -> int:
    return 4 * pairs + 5 * _questions(pairs) - 1


def _needle(draw: Draw, pairs: int, length: int) -> tuple[list[int], list[Question]]:
    facts = _facts(draw, pairs)
    questions = _asked(draw.shuffled(facts)[:1])
    return draw.among_noise([list(fact) for fact in facts], length - _tokens(questions)), questions


def _two_hop(draw: Draw, pairs: int, length: int, written: bool) -> tuple[list[int], list[Question]]:
    keys = draw.some(draw.words.keys, 2 * pairs)
    first, middle, last = keys[:pairs], keys[pairs:], draw.any(draw.words.values, pairs)
    facts = draw.shuffled([*zip(first, middle, strict=True), *zip(middle, last, strict=True)])
    chosen = int(draw.stream.integers(pairs))
    hop = (
        [mark("?"), first[chosen], middle[chosen], mark("?"), middle[chosen]] if written else [mark("?"), first[chosen]]
    )
    return draw.among_noise([list(fact) for fact in facts], length - len(hop)), [(hop, last[chosen])]


def _common_word(draw: Draw, pairs: int, length: int, marked: bool) -> tuple[list[int], list[Question]]:
    common, *others = draw.some(draw.words.values, pairs)
    items = draw.shuffled([common] * MOST_COMMON + others)
    sign = mark("#") if marked else draw.some(draw.words.keys, 1)[0]
    questions: list[Question] = [([mark("?"), sign], common)]
    return draw.among_noise([[sign, word] for word in items], length - _tokens(questions)), questions


def _offset(draw: Draw, pairs: int, length: int, offset: int) -> tuple[list[int], list[Question]]:
    listed = draw.some(range(draw.words.keys.start, draw.words.values.stop), pairs)
    place = int(draw.stream.integers(pairs - offset))
    # one question: an answer that is written out would follow its key a second time
    questions: list[Question] = [([mark("?"), listed[place]], listed[place + offset])]
    return draw.any(draw.words.noise, length - pairs - _tokens(questions)) + listed, questions


def _questions(pairs: int) -> int:
    return min(MOST_QUESTIONS, pairs)


def _guess(offered: int, questions: int, words: Words) -> float:
    """Accuracy of naming the most frequent of ``offered`` values. Each answer is taken out after its question, and the
    n that are left are as random as the first. If all values differed, it would be the mean of 1 / n.
    """
    left = np.arange(offered, offered - questions, -1)
    return float((largest(offered, len(words.values))[left] / left).mean())


KINDS: dict[str, Kind] = {
    "mqar": Kind(
        "every key of a list of pairs is asked after a gap",
        lambda n: 5 * n - 1,
        _mqar,
        lambda n: (n, 1),
        lambda n, words: _guess(n, n, words),
    ),
    "system-prompt": Kind(
        "variables set at the start are asked after a scratchpad of noise",
        lambda n: 2 * n + 2 + 3 * _questions(n) - 1,
        partial(_system_prompt, distractors=False),
        lambda n: (n, 1),
        lambda n, words: _guess(n, _questions(n), words),
    ),
    "system-prompt-distractors": Kind(
        "as system-prompt, with assignments of other variables in the scratchpad",
        lambda n: 4 * n + 2 + 3 * _questions(n) - 1,
        partial(_system_prompt, distractors=True),
        lambda n: (2 * n, 1),
        lambda n, words: _guess(n, _questions(n), words),  # distractors stand outside the prompt
    ),
    "tool-trace": Kind(
        "results of calls by several agents and tools are asked",
        lambda n: 5 * n + 6 * _questions(n) - 1,
        _tool_trace,
        lambda n: (4 * _side(n), 1),
        lambda n, words: _guess(n, _questions(n), words),
    ),
    "economy": Kind(
        "how much gold or wood an agent has after mining, trading and building",
        _economy_size,
        _economy,
        lambda n: (4 * _agents(n), MOST_OF_A_RESOURCE + 1),
        _economy_guess,
    ),
    "needle": Kind(
        "pairs at any depth of a haystack, one is asked",
        lambda n: 2 * n + 2,
        _needle,
        lambda n: (n, 1),
        lambda n, words: _guess(n, 1, words),
    ),
    "two-hop": Kind(
        "a key leads to a key that leads to a value",
        lambda n: 4 * n + 2,
        partial(_two_hop, written=False),
        lambda n: (2 * n, 1),
        lambda n, words: _guess(n, 1, words),
    ),
    "two-hop-written": Kind(
        "as two-hop, with the first hop written out",
        lambda n: 4 * n + 5,
        partial(_two_hop, written=True),
        lambda n: (2 * n, 1),
        lambda n, words: _guess(n, 1, words),
    ),
    "common-word": Kind(
        "which word of a list occurs most often",
        lambda n: 2 * (n + MOST_COMMON - 1) + 2,
        partial(_common_word, marked=True),
        lambda n: (0, n),
        lambda n, words: MOST_COMMON / (n + MOST_COMMON - 1),
    ),
    "common-value": Kind(
        "which value stands after a key most often",
        lambda n: 2 * (n + MOST_COMMON - 1) + 2,
        partial(_common_word, marked=False),
        lambda n: (1, n),
        lambda n, words: MOST_COMMON / (n + MOST_COMMON - 1),
    ),
    **{
        f"offset-{offset}": Kind(
            f"the word {offset} after the one that is asked",
            lambda n: n + 2,
            partial(_offset, offset=offset),
            lambda n: (n - n // 2, n // 2),
            # the first words are never an answer
            lambda n, words, offset=offset: 1 / (n - offset),
        )
        for offset in OFFSETS
    },
}


def check(kind: str, pairs: int, length: int, words: Words) -> None:
    """Raises: ArgumentError when these words cannot form a sequence of this kind with so many pairs and tokens."""
    found = KINDS[kind]
    if pairs < 1:
        raise ArgumentError(f"Retrieval: at least 1 pair is required, got {pairs}.")
    if kind.startswith("offset-") and pairs < (least := int(kind.removeprefix("offset-")) + 2):
        raise ArgumentError(
            f"Retrieval: {kind} requires at least {least} words, of which two can be asked, got {pairs}."
        )
    keys, values = found.needs(pairs)
    for name, needed, there in (("keys", keys, len(words.keys)), ("values", values, len(words.values))):
        if needed > there:
            raise ArgumentError(
                f"Retrieval: {kind} with {pairs} pairs requires {needed} {name}, a vocabulary of {words.size} has "
                f"{there}. Give a larger one."
            )
    if found.size(pairs) > length:
        raise ArgumentError(
            f"Retrieval: {kind} with {pairs} pairs takes {found.size(pairs)} tokens; "
            f"a length of that or more is required, got {length}."
        )


def example(kind: str, pairs: int, length: int, words: Words, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets), int64 (length,), of the sequence named by ``key``: a pure function of the arguments, which
    ``check`` has passed.
    """
    context, questions = KINDS[kind].compose(Draw(stream(*key), words), pairs, length)
    tokens, targets = np.empty(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
    end = len(context)
    tokens[:end] = context
    for asked, answer in questions:
        tokens[end : end + len(asked)] = asked
        end += len(asked)
        targets[end - 1] = answer
        if end < length:
            tokens[end] = answer
            end += 1
    return tokens, targets
