"""Every task's answers against an independent reading of what its sequences say."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.tasks.algorithmic import ALGORITHMS, Algorithmic

BLANK, ANSWER, ASK, PLUS = "·", ">", "?", "+"


def number(word):
    return int(word[1:])


def names(numbers):
    return [f"w{each}" for each in numbers]


def asked(context):
    """What stands after the last question mark, and what before the first."""
    last = len(context) - context[::-1].index(ASK)
    return context[last:], context[: context.index(ASK)]


def counting(said, context):
    (word,), found = asked(context)
    return names([found.count(word)])


def histogram(said, context):
    found = said[: said.index(ASK)]
    return names([found.count(context[-1])])


def addition(said, context):
    place = context.index(PLUS)
    first, second = ("".join(str(number(word)) for word in part) for part in (context[:place], context[place + 1 :]))
    total = str(int(first) + int(second)).rjust(len(first) + 1, "0")
    return names(reversed([int(digit) for digit in total]))


def parity(said, context):
    odd, found = False, []
    for word in context:
        odd ^= word == "w1"
        found.append(int(odd))
    return names(found)


def modular(said, context):
    a, _, b = context[-3:]
    return names([(number(a) + number(b)) % 32])


def multihop(said, context):
    (word, hops), facts = asked(context)
    leads = dict(zip(facts[::2], facts[1::2], strict=True))
    for _ in range(number(hops)):
        word = leads[word]
    return [word]


def pairs(said, context):
    (key,), _ = asked(context)
    facts = said[: said.index(ASK)]
    return [dict(zip(facts[::2], facts[1::2], strict=True))[key]]


def bigram(said, context):
    (word,), found = asked(context)
    followers = Counter(b for a, b in pairwise(found) if a == word).most_common()
    assert len(followers) == 1 or followers[0][1] > followers[1][1]
    return [followers[0][0]]


def majority(said, context):
    ((word, most), (_, next_most), *_) = [*Counter(context).most_common(), ("", 0)]
    assert most > next_most
    return [word]


def induction(said, context):
    assert context.count(context[-1]) == 2
    return [context[context.index(context[-1]) + 1]]


def noisy_copy(said, context):
    size = len(context) // 3
    copies = [context[place : place + size] for place in (0, size, 2 * size)]
    return [Counter(words).most_common(1)[0][0] for words in zip(*copies, strict=True)]


def compression(said, context):
    found, runs = [], []
    for word in context:
        if found and found[-1] == word:
            runs[-1] += 1
        else:
            found.append(word)
            runs.append(1)
    return [each for word, count in zip(found, runs, strict=True) for each in (word, f"w{count}")]


def pattern(said, context):
    # the period is the shortest with which the words repeat, or a multiple of what repeats in it
    period = next(size for size in range(1, len(context)) if context[size:] == context[:-size])
    return lambda count: [context[-period:][place % period] for place in range(count)]


def words(context):
    return [word for word in context if word != BLANK]


ORACLES = {
    "copy": lambda said, context: context,
    "reverse": lambda said, context: context[::-1],
    "sort": lambda said, context: sorted(context, key=number),
    "counting": counting,
    "parity": parity,
    "addition": addition,
    "modular": modular,
    "long-copy": lambda said, context: words(context),
    "distant-match": lambda said, context: ["w1" if context[0] == context[-1] else "w0"],
    "multihop": multihop,
    "retrieval": pairs,
    "kv-recall": pairs,
    "first-token": lambda said, context: context[:1],
    "selective-copy": lambda said, context: words(context),
    "bigram": bigram,
    "majority": majority,
    "histogram": histogram,
    "induction": induction,
    "pattern": pattern,
    "noisy-copy": noisy_copy,
    "compression": compression,
}


def segments(task, tokens, targets):
    """(all that was read, what was read since the last answer, the answer) of each answer of a sequence."""
    said, start, answer = [], 0, []
    for token, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        said.append(task.word(token))
        if target != tasks.IGNORED:
            answer.append(task.word(target))
        elif answer:
            yield said, said[start : len(said) - len(answer) - 1], answer
            start, answer = len(said), []
    if answer:
        yield said, said[start : len(said) - len(answer)], answer


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "stack"])
def test_answers_follow_from_what_is_read(name):
    task = tasks.resolve(name)
    batch = task.train_batch(3, 40, 1)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        found = list(segments(task, tokens, targets))
        assert found
        for said, context, answer in found:
            # blanks before a sequence are not part of it
            first = next(place for place, word in enumerate(said) if word != BLANK)
            context = context if said is not found[0][0] or len(context) < first else context[first:]
            expected = ORACLES[name](said[first:], context)
            assert answer == (expected(len(answer)) if callable(expected) else expected), " ".join(said)


def test_answers_of_the_stack():
    task = tasks.resolve("stack")
    batch = task.train_batch(3, 40, 1)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        stack, answered = [], False
        for token, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            word = task.word(token)
            if word == ANSWER:
                assert task.word(target) == stack.pop()
            elif word != BLANK and not answered:
                stack.append(word)
            answered = word == ANSWER
        assert not stack
    assert (batch.targets >= 0).sum() > len(batch.targets)  # some rows pop more than one


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("vocab_size", "length"), [(20, 24), (36, 64), (50, 97)])
def test_sequences_fit_and_repeat(name, vocab_size, length):
    task = Algorithmic(name, vocab_size=vocab_size, length=length, test_examples=3)
    batch, again = task.train_batch(5, 16, 2), task.train_batch(5, 16, 2)
    assert batch.tokens.shape == (16, task.length)
    assert torch.equal(batch.tokens, again.tokens)
    assert not torch.equal(batch.tokens, task.train_batch(6, 16, 2).tokens)
    assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size
    assert {tuple(row.slices["items"]) for row in task.evaluation_batches(3)} == {
        (size,) * 3 for size in {task.least, max(task.least, task.most // 2), task.most}
    }
    assert tasks.from_config(task.config()).config() == task.config()


def test_a_guess_is_what_is_reached_without_learning():
    assert tasks.resolve("parity").guess().value == pytest.approx(0.5, abs=0.02)
    # answers that were named are left out: (1 / n + … + 1) / n of n pairs
    recall = tasks.resolve("kv-recall")
    sizes = {recall.least, recall.most // 2, recall.most}
    expected = np.mean([sum(1 / left for left in range(1, n + 1)) / n for n in sizes])
    assert recall.guess().value == pytest.approx(expected, abs=0.02)  # some values stand there twice
    assert tasks.resolve("distant-match").guess().value == pytest.approx(0.5, abs=0.04)
    assert tasks.resolve("modular").guess().value == pytest.approx(1 / 32, abs=0.015)
    # every word is named once: (1 / n + … + 1) / n of n words, less where some stand there twice
    copy = tasks.resolve("copy")
    sizes = {copy.least, copy.most // 2, copy.most}
    expected = np.mean([sum(1 / left for left in range(1, n + 1)) / n for n in sizes])
    assert expected <= copy.guess().value < expected + 0.06
    for name in ("sort", "reverse", "long-copy"):
        assert tasks.resolve(name).guess().value == pytest.approx(copy.guess().value, abs=0.02)
    assert tasks.resolve("pattern").guess().value > copy.guess().value  # the copies of a period say nothing new
    # a word on a small stack is often its top; a run is one of those not named, and of length 1 in a quarter
    assert tasks.resolve("stack").guess().value == pytest.approx(0.61, abs=0.03)
    assert tasks.resolve("compression").guess().value == pytest.approx(0.37, abs=0.03)
    # half of the words, or more, are the majority's
    assert 0.4 < tasks.resolve("majority").guess().value < 0.6


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"parity"}))
def test_the_evaluation_holds_no_sequences_of_training(name):
    task = tasks.resolve(name)
    shown = {tuple(tokens.tolist()) for step in range(30) for tokens in task.train_batch(step, 32, seed=0).tokens}
    asked = [tuple(tokens.tolist()) for batch in task.evaluation_batches(50) for tokens in batch.tokens]
    assert np.mean([tokens in shown for tokens in asked]) < 0.02


class Right:
    """Says what is asked, but for the last answer of some rows."""

    def __init__(self, task, wrong):
        self.right = {
            tuple(tokens.tolist()): targets
            for batch in task.evaluation_batches(50)
            for tokens, targets in zip(batch.tokens, batch.targets, strict=True)
        }
        self.vocab_size, self.wrong, self.seen = task.vocab_size, wrong, 0

    def parameters(self):
        return iter([torch.nn.Parameter(torch.zeros(1))])

    def __call__(self, tokens):
        said = torch.stack([self.right[tuple(row.tolist())].clamp_min(0) for row in tokens])
        for row in said:
            self.seen += 1
            if self.seen % self.wrong == 0:
                row[-1] = (row[-1] + 1) % self.vocab_size
        return torch.nn.functional.one_hot(said, self.vocab_size).float()


def test_exact_match_counts_whole_sequences():
    task = Algorithmic("reverse", test_examples=40)
    found = [value for each in task.examine(Right(task, 4), 10) for value in each.values["exact match"]]
    assert len(found) == 3 * 40
    assert sum(found) == 3 * 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "srot"}, "unknown task 'srot'.*'sort'"),
        ({"name": "sort", "vocab_size": 19}, "at least 20 tokens.*got vocab_size=19"),
        ({"name": "sort", "length": 3}, "sort requires a length of at least 4, got 3"),
        ({"name": "sort", "test_examples": 0}, "1 test example.*got .*test_examples=0"),
        ({"name": "sort", "seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_made_is_refused(settings, message):
    with pytest.raises(ArgumentError, match=message):
        Algorithmic(**settings)
