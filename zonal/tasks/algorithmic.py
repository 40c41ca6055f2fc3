"""Small programs on sequences of words: the 22 tasks that the SLAY paper names, each with a definition, examples and
a chance level.

The paper prints names and accuracies (its tables 3 to 9), no definitions. These are this library's, made so that the
answer follows from the context alone:

    copy, reverse, sort    x1 … xn > x1 … xn                  the words again, backwards, in their order
    counting               x1 … xn ? c > m                    how often c stands among them
    parity                 b1 … bn > p1 … pn                  p_i = b_1 xor … xor b_i, written out
    addition               a1 … an + b1 … bn > s0 … sn        decimal numbers, the sum from its last digit
    modular                a + b > c  d + e > f …             sums modulo the number of words
    long-copy              x1 … xn · · · · > x1 … xn          copy, after a gap that is longer than the words
    distant-match          x z1 … z8n y > w1                  w1 where the first word and the last are equal, else w0
    multihop               a b  c d  b e … ? a m > e          m = 1, 2 or 3 steps along pairs
    retrieval              k1 v1 … kn vn ? k > v              one of the pairs
    kv-recall              k1 v1 … kn vn ? k3 > v3 ? k1 > …   all of them
    first-token            x1 … xn > x1                       the first word
    selective-copy         · x1 · · x2 · … > x1 … xn          the words among noise, in order
    bigram                 x1 … xn ? a > b                    the word that followed a most often
    majority               x1 … xn > x                        the most frequent of three words
    histogram              x1 … xn ? a > m  ? b > l …         how often each of four words stands there
    stack                  x1 x2 > x2 x3 x4 > x4 > x3         what lies on top is taken at each >
    induction              x1 … xn x3 > x4                    what followed the last word when it stood there before
    pattern                x1 x2 x3 x1 x2 x3 x1 > x2 x3 x1    the next words of a period
    noisy-copy             x1 … xn y1 … yn z1 … zn > o1 … on  three copies; each word is wrong in at most one
    compression            a a a b b > a 3 b 2                runs and their lengths

("copy, reverse, sort" are three tasks.) Words are numbers: w3 is also the number 3. n is drawn for each sequence, and a
shorter sequence has blanks (·) before it. Few items can make few sequences: parity of seven bits has 128, so training
has shown nearly all that the evaluation asks of this number; compression of two runs has 15,872.

Source: SLAY (001), tables 3 to 9; selective copy, induction and stack follow the usual tasks of these names.
"""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np

from zonal.errors import ArgumentError, unknown_name
from zonal.names import known_names
from zonal.tasks.task import IGNORED, Batch, Drawn, Examined, Examinee, Guess, check_batch, stream

_SIZES = 2
_LEAST_WORDS = 16
BLANK, ANSWER, ASK, PLUS = range(4)
_MARKERS = "·>?+"

Segments = list[tuple[list[int], list[int]]]
"""What is read, and what is to be answered after it; a sequence has one or more of these."""


@dataclass(frozen=True)
class Draw:
    """Random parts of a sequence of at most ``length`` tokens. Words are the numbers 0 to ``words`` - 1 here, and
    markers are negative.
    """

    chance: np.random.Generator
    words: int
    length: int

    def any(self, count: int, most: int | None = None) -> list[int]:
        """``count`` words, each any of the first ``most``."""
        return self.chance.integers(0, self.words if most is None else most, count).tolist()

    def different(self, count: int) -> list[int]:
        return self.chance.permutation(self.words)[:count].tolist()

    def one(self, choices: list[int]) -> int:
        return choices[int(self.chance.integers(len(choices)))]


def marker(which: int) -> int:
    return -1 - which


@dataclass(frozen=True)
class Algorithm:
    """One task.

    about: one line. size: the most tokens that n items take. compose: (draw, n) → segments of n items. length: of a
    sequence, where none is given. turns: how many kinds of answers take turns. values: half of the words of the context
    are keys, which are no answers.
    """

    about: str
    size: Callable[[int], int]
    compose: Callable[[Draw, int], Segments]
    length: int = 64
    turns: int = 1
    values: bool = False


def _copy(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    return [(found, found)]


def _reverse(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    return [(found, found[::-1])]


def _sort(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    return [(found, sorted(found))]


def _counting(draw: Draw, n: int) -> Segments:
    few = draw.different(4)
    found = [draw.one(few) for _ in range(n)]
    asked = draw.one(few)
    return [([*found, marker(ASK), asked], [found.count(asked)])]


def _parity(draw: Draw, n: int) -> Segments:
    bits = draw.any(n, 2)
    return [(bits, (np.cumsum(bits) % 2).tolist())]


def _addition(draw: Draw, n: int) -> Segments:
    first, second = draw.any(n, 10), draw.any(n, 10)
    total = int("".join(map(str, first))) + int("".join(map(str, second)))
    return [([*first, marker(PLUS), *second], [int(digit) for digit in reversed(str(total).zfill(n + 1))])]


def _modular(draw: Draw, n: int) -> Segments:
    pairs = [draw.any(2) for _ in range(n)]
    return [([a, marker(PLUS), b], [(a + b) % draw.words]) for a, b in pairs]


def _long_copy(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    return [(found + [marker(BLANK)] * (draw.length - 2 * n), found)]


def _distant_match(draw: Draw, n: int) -> Segments:
    first, other = draw.different(2)
    same = int(draw.chance.integers(2))
    return [([first, *draw.any(8 * n), first if same else other], [same])]


def _multihop(draw: Draw, n: int) -> Segments:
    chains = draw.different(4 * n)
    facts = [chains[place : place + 2] for place in range(4 * n) if place % 4 != 3]
    context = [word for place in draw.chance.permutation(len(facts)) for word in facts[place]]
    chain, hops = 4 * int(draw.chance.integers(n)), int(draw.chance.integers(1, 4))
    return [([*context, marker(ASK), chains[chain], hops], [chains[chain + hops]])]


def _pairs(draw: Draw, n: int) -> tuple[list[int], list[int], list[int]]:
    keys, values = draw.different(n), draw.any(n)
    return keys, values, [word for pair in zip(keys, values, strict=True) for word in pair]


def _retrieval(draw: Draw, n: int) -> Segments:
    keys, values, context = _pairs(draw, n)
    asked = int(draw.chance.integers(n))
    return [([*context, marker(ASK), keys[asked]], [values[asked]])]


def _kv_recall(draw: Draw, n: int) -> Segments:
    keys, values, context = _pairs(draw, n)
    order = draw.chance.permutation(n).tolist()
    return [
        ([*(context if place == 0 else []), marker(ASK), keys[asked]], [values[asked]])
        for place, asked in enumerate(order)
    ]


def _first_token(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    return [(found, found[:1])]


def _selective_copy(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    context = np.full(draw.length - n, marker(BLANK))
    context[np.sort(draw.chance.permutation(len(context))[:n])] = found
    return [(context.tolist(), found)]


def _bigram(draw: Draw, n: int) -> Segments:
    few = draw.different(5)
    while True:
        after = {word: draw.one([other for other in few if other != word]) for word in few}
        found = [draw.one(few)]
        while len(found) < n:
            found.append(after[found[-1]] if draw.chance.random() < 0.75 else draw.one(few))
        clear: list[tuple[int, int]] = []
        for word in few:
            followers = [b for a, b in pairwise(found) if a == word]
            counts = sorted(((followers.count(each), each) for each in set(followers)), reverse=True)
            if counts and (len(counts) == 1 or counts[0][0] > counts[1][0]):
                clear.append((word, counts[0][1]))
        if clear:
            asked, answer = clear[int(draw.chance.integers(len(clear)))]
            return [([*found, marker(ASK), asked], [answer])]


def _majority(draw: Draw, n: int) -> Segments:
    few = draw.different(3)
    while True:
        found = [draw.one(few) for _ in range(n)]
        counts = sorted((found.count(word), word) for word in few)
        if counts[-1][0] > counts[-2][0]:
            return [(found, [counts[-1][1]])]


def _histogram(draw: Draw, n: int) -> Segments:
    few = draw.different(4)
    found = [draw.one(few) for _ in range(n)]
    return [
        ([*(found if place == 0 else []), marker(ASK), word], [found.count(word)]) for place, word in enumerate(few)
    ]


def _stack(draw: Draw, n: int) -> Segments:
    segments: Segments = []
    stack: list[int] = []
    pushed: list[int] = []
    left = n
    while left or stack:
        if left and (not stack or draw.chance.random() < 0.5):
            pushed.append(draw.any(1)[0])
            stack.append(pushed[-1])
            left -= 1
        else:
            segments.append((pushed, [stack.pop()]))
            pushed = []
    return segments


def _induction(draw: Draw, n: int) -> Segments:
    found = draw.different(n)
    place = int(draw.chance.integers(n - 1))
    return [([*found, found[place]], [found[place + 1]])]


def _pattern(draw: Draw, n: int) -> Segments:
    period = draw.any(n)
    shown = int(draw.chance.integers(2 * n, 3 * n))
    return [((period * 3)[:shown], [period[(shown + place) % n] for place in range(n)])]


def _noisy_copy(draw: Draw, n: int) -> Segments:
    found = draw.any(n)
    copies = [list(found) for _ in range(3)]
    for place, wrong in enumerate(draw.chance.integers(0, 6, n).tolist()):
        if wrong < 3:  # in half of the places one of the copies is wrong
            copies[wrong][place] = (found[place] + 1 + int(draw.chance.integers(draw.words - 1))) % draw.words
    return [([word for copy in copies for word in copy], found)]


def _compression(draw: Draw, n: int) -> Segments:
    runs = draw.any(n)
    for place in range(1, n):
        if runs[place] == runs[place - 1]:
            runs[place] = (runs[place] + 1) % draw.words
    counts = draw.chance.integers(1, 5, n).tolist()
    return [
        (
            [word for word, count in zip(runs, counts, strict=True) for _ in range(count)],
            [number for pair in zip(runs, counts, strict=True) for number in pair],
        )
    ]


ALGORITHMS: dict[str, Algorithm] = {
    "copy": Algorithm("the words again", lambda n: 2 * n, _copy),
    "sort": Algorithm("the words in the order of their numbers", lambda n: 2 * n, _sort),
    "reverse": Algorithm("the words backwards", lambda n: 2 * n, _reverse),
    "counting": Algorithm("how often a word stands in a list of four different ones", lambda n: n + 3, _counting),
    "parity": Algorithm("the parity of all bits so far, at each bit", lambda n: 2 * n, _parity),
    "addition": Algorithm("the sum of two decimal numbers, from its last digit", lambda n: 3 * n + 2, _addition),
    "modular": Algorithm("sums modulo the number of words", lambda n: 5 * n - 1, _modular),
    "long-copy": Algorithm("the words again after a long gap", lambda n: 8 * n, _long_copy, 256),
    "distant-match": Algorithm("whether the last word is the first one", lambda n: 8 * n + 3, _distant_match, 256),
    "multihop": Algorithm("the end of one, two or three steps along pairs", lambda n: 6 * n + 4, _multihop),
    "retrieval": Algorithm("the value of one of many keys", lambda n: 2 * n + 3, _retrieval),
    "kv-recall": Algorithm("the values of all keys, in another order", lambda n: 6 * n - 1, _kv_recall, values=True),
    "first-token": Algorithm("the first word", lambda n: n + 1, _first_token),
    "selective-copy": Algorithm("the words among noise, in order", lambda n: 4 * n, _selective_copy),
    "bigram": Algorithm("the word that followed another most often", lambda n: n + 3, _bigram),
    "majority": Algorithm("the most frequent of three words", lambda n: n + 1, _majority),
    "histogram": Algorithm("how often each of four words stands there", lambda n: n + 15, _histogram),
    "stack": Algorithm("the top of a stack, each time it is taken off", lambda n: 3 * n, _stack),
    "induction": Algorithm("the word that followed this one before", lambda n: n + 2, _induction),
    "pattern": Algorithm("the next words of a period", lambda n: 4 * n, _pattern),
    "noisy-copy": Algorithm("the words of three copies with mistakes", lambda n: 4 * n, _noisy_copy),
    "compression": Algorithm("the runs of equal words and their lengths", lambda n: 6 * n, _compression, turns=2),
}
"""The tasks in the order of the paper's tables."""


@known_names
@dataclass(eq=False)
class Algorithmic(Drawn[int]):
    """Sequences of the task ``name``, of ``length`` tokens, with a vocabulary of ``vocab_size`` words and markers.

    n, the number of items, is drawn from a quarter of what fits up to all of it, in training; the evaluation has
    ``test_examples`` sequences of a quarter, of half and of all. Slices: "items". Metric: the share of right words of
    the answers. ``examine`` measures "exact match", the share of sequences whose answers are all right. Raises:
    ArgumentError when the task is unknown or a number is out of range.
    """

    name: str
    _: KW_ONLY
    vocab_size: int = 36
    length: int = 64
    test_examples: int = 200
    seed: int = 0

    kind, subject, metric = "algorithmic", "Small programs", "accuracy"

    def __post_init__(self) -> None:
        if self.name not in ALGORITHMS:
            raise unknown_name("Algorithmic", "task", self.name, ALGORITHMS)
        self.algorithm = algorithm = ALGORITHMS[self.name]
        self.words = self.vocab_size - len(_MARKERS)
        if self.words < _LEAST_WORDS or self.test_examples < 1 or self.seed < 0:
            raise ArgumentError(
                f"Algorithmic: a vocabulary of at least {_LEAST_WORDS + len(_MARKERS)} tokens, 1 test example and a "
                f"seed of at least 0 are required, got vocab_size={self.vocab_size}, "
                f"test_examples={self.test_examples}, seed={self.seed}."
            )
        # numbers up to n are words, too; four words stand in each chain of multihop
        most = self.words // 4 if self.name == "multihop" else self.words - 1
        fitting = [n for n in range(2, most + 1) if algorithm.size(n) <= self.length]
        if not fitting:
            raise ArgumentError(
                f"Algorithmic: {self.name} requires a length of at least {algorithm.size(2)}, got {self.length}."
            )
        self.most = fitting[-1]
        self.least = max(2, self.most // 4)
        self.groups = ("marker", "word"), (len(_MARKERS),)

    def row(self, cell: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        segments = self.algorithm.compose(Draw(stream(*key), self.words, self.length), cell)
        read: list[int] = []
        asked: list[int] = []
        for context, answer in segments:
            read += [*context, marker(ANSWER), *answer]
            asked += [IGNORED] * len(context) + [word + len(_MARKERS) for word in answer] + [IGNORED]
        # what would follow the last word of the answer is not read
        del read[-1], asked[-1]
        blanks = self.length - len(read)
        tokens = np.full(self.length, BLANK, dtype=np.int64)
        targets = np.full(self.length, IGNORED, dtype=np.int64)
        tokens[blanks:] = [word + len(_MARKERS) if word >= 0 else -1 - word for word in read]
        targets[blanks:] = asked
        return tokens, targets

    def slices(self, cell: int) -> dict[str, int]:
        return {"items": cell}

    def training_cells(self, step: int, seed: int, numbers: range) -> list[int]:
        return [int(stream(self.seed, seed, number, _SIZES).integers(self.least, self.most + 1)) for number in numbers]

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        sizes = sorted({self.least, max(self.least, self.most // 2), self.most})
        return self.fixed([(size, size) for size in sizes], self.test_examples, batch_size, use)

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        check_batch("Algorithmic.examine", batch_size)
        device = next(model.parameters()).device
        for batch in self.evaluation_batches(batch_size):
            said = model(batch.tokens.to(device)).argmax(-1).cpu()
            right = ((said == batch.targets) | (batch.targets == IGNORED)).all(-1)
            yield Examined({"exact match": right.double().tolist()}, batch.slices)

    def guess(self) -> Guess:
        """The best of four ways to answer that need no learning: always the word that is right most often; any word
        that was read; any that was read and not yet named as often; or any of the different words that were not named
        at all. Kinds of answers that take turns have a way each.
        """
        turns = self.algorithm.turns
        always, among = np.zeros((turns, self.vocab_size)), np.zeros((turns, 3))
        rows = 0
        for batch in self.evaluation_batches(self.test_examples):
            for tokens, targets in zip(batch.tokens.numpy(), batch.targets.numpy(), strict=True):
                places = np.flatnonzero(targets != IGNORED)
                answers = targets[places]
                read = tokens >= len(_MARKERS)
                read[places[places + 1 < self.length] + 1] = False  # answers, written out
                _, short = np.unique(np.concatenate([tokens, answers]), return_inverse=True)  # words of this sequence
                each = np.eye(short.max() + 1)[short]
                words = (each[: self.length] * read[:, None]).cumsum(0)[places]  # (answers, words)
                asked = each[self.length :]
                named = asked.cumsum(0) - asked
                left = asked[::-1].cumsum(0)[::-1] if self.algorithm.values else np.maximum(words - named, 0)
                ways = np.stack([words, left, (words > 0) & (named == 0)])
                chances = (ways * asked).sum(2) / np.maximum(1, ways.sum(2))
                turn = np.arange(len(answers)) % turns
                np.add.at(always, (turn, answers), 1 / len(answers))
                np.add.at(among, turn, chances.T / len(answers))
                rows += 1
        return Guess(float(np.maximum(always.max(1), among.max(1)).sum() / rows))

    def describe(self) -> str:
        return (
            f"{self.name}: {self.algorithm.about}; {self.least} to {self.most} items in {self.length} tokens, "
            f"{self.words} words; a guess is right in {self.guess().value:.0%}."
        )

    def word(self, token: int) -> str:
        """w3 for the word with that number, markers as they are."""
        return _MARKERS[token] if token < len(_MARKERS) else f"w{token - len(_MARKERS)}"
