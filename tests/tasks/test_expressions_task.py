"""Expressions are read by a solver that sees words alone and knows the rules from the documentation, not from the
generator.
"""

import pytest
import torch

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.tasks import Expressions
from zonal.tasks.expressions import ATOMS, DEEPEST, LONGEST, parse, written


def read(words):
    """One expression from the front of a list of words: nested lists, atoms as words."""
    word = words.pop(0)
    if word != "(":
        return word
    found = []
    while words[0] != ")":
        found.append(read(words))
    words.pop(0)
    return found


def reading(tree):
    if isinstance(tree, str):
        return tree
    head, *arguments = tree
    arguments = [reading(each) for each in arguments]
    return [head, *(reversed(arguments) if int(head[1:]) % 2 else arguments)]


def missing(whole, with_gap):
    """What stands in ``whole`` where the other has its gap; everything else must agree."""
    if with_gap == "_":
        return whole
    if isinstance(whole, str):
        assert whole == with_gap
        return None
    assert len(whole) == len(with_gap) == 3
    found = [missing(a, b) for a, b in zip(whole, with_gap, strict=True)]
    return next((each for each in found if each is not None), None)


def depth_of(tree):
    return 0 if isinstance(tree, str) else 1 + max(map(depth_of, tree[1:]))


def text(tree):
    return tree if isinstance(tree, str) else f"( {' '.join(map(text, tree))} )"


def solve(task, tokens):
    """The answer as text, from a prompt."""
    words = task.decode(tokens).split()
    words = words[words.index("(") :]
    same, left, right = read(words)
    assert (same, words[0]) == ("=", "?")
    return left, text(missing(reading(left), right))


def asked(task, batch, row):
    """(prompt, answer) of a row of an evaluation batch."""
    return batch.tokens[row, : batch.tokens.shape[1] - LONGEST].tolist(), [
        token for token in batch.targets[row].tolist() if token >= 0
    ]


def test_the_answer_is_in_the_context():
    task = Expressions(test_examples=40)
    for batch in task.evaluation_batches(16):
        for row, depth in enumerate(batch.slices["depth"]):
            prompt, answer = asked(task, batch, row)
            left, found = solve(task, prompt)
            assert task.decode(answer) == f"{found} ."
            assert depth_of(left) == depth
            atoms = [word for word in text(left).split() if word.startswith("a")]
            assert len(set(atoms)) == len(atoms)
            # what follows the prompt is the answer, as far as it fits
            assert batch.tokens[row, len(prompt) :].tolist()[: len(answer) - 1] == answer[:-1]


def task_token(task, word):
    return next(token for token in range(task.vocab_size) if task.decode([token]) == word)


def test_training_asks_for_heads_and_atoms_of_the_reading():
    task = Expressions((5, 8))
    batch = task.train_batch(0, 16, seed=1)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        prompt = tokens[: len(tokens) - LONGEST]
        left, answer = solve(task, prompt)
        gap = prompt.index(task_token(task, "_"))
        size = len(text(left).split())
        # the second tree, which is as long as the first but for what was put out, then its bracket and the question
        second = range(len(prompt) - 2 - (size - len(answer.split()) + 1), len(prompt) - 2)
        expected = {place - 1: prompt[place] for place in second if task.decode([prompt[place]])[0] in "fa"}
        assert gap in second
        expected |= {
            len(prompt) - 1 + place: task_token(task, word) for place, word in enumerate(f"{answer} .".split())
        }
        assert {place: target for place, target in enumerate(targets) if target >= 0} == expected


def test_training_begins_with_shallow_trees():
    task = Expressions()
    seen = [
        {task.train_batch(step, 1, 0).slices["depth"][0] for step in steps}
        for steps in (range(50), range(50, 100), range(2000, 2100))
    ]
    assert seen == [{2, 3}, {2, 3, 4}, set(range(2, 16))]
    assert task.length == max(batch.tokens.shape[1] for batch in task.evaluation_batches(64))


def test_no_test_sequence_is_trained():
    task = Expressions((5,), test_examples=100)
    trees = {tuple(row) for batch in task.evaluation_batches(50) for row in batch.tokens.tolist()}
    assert len(trees) == 100
    assert not trees & {tuple(row) for step in range(40) for row in task.train_batch(step, 16, 0).tokens.tolist()}


@pytest.mark.parametrize("words", ["a3", "( f0 a1 a2 )", "( f1 ( f2 a0 a1 ) a2 )", "( f1 a2 ( f7 a0 a1 ) )"])
def test_expressions_parse(words):
    tokens = [task_token(Expressions(), word) for word in words.split()]
    assert written(parse(tokens)) == tokens


@pytest.mark.parametrize(
    "words",
    [
        "",
        "(",
        ")",
        "f0",
        "( f0 a1 )",
        "( f0 a1 a2",
        "( f0 a1 a2 a3 )",
        "( a0 a1 a2 )",
        "( f0 f1 a2 )",
        "a1 a2",
        "( f0 a1 a2 ) )",
        "( f0 a1 _ )",
        "( f0 a1 = )",
    ],
)
def test_what_is_no_expression(words):
    task = Expressions()
    assert parse([task_token(task, word) for word in words.split()]) is None


class Writer:
    """A model that writes what ``say`` makes of a prompt."""

    def __init__(self, say):
        self.say = say

    def parameters(self):
        return iter([torch.zeros(1)])

    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=()):
        assert temperature == 0
        rows = [self.say(row)[:max_new_tokens] for row in tokens.tolist()]
        for place in range(max(map(len, rows))):
            yield torch.tensor([row[place] if place < len(row) else -1 for row in rows])


def test_examination():
    task = Expressions((5, 9), test_examples=6)

    def solution(row):
        return [task_token(task, word) for word in (solve(task, row)[1] + " .").split()]

    def cells(say):
        found = list(task.examine(Writer(say), 4))
        assert [each.slices["depth"] for each in found] == [[5] * 4, [5] * 2, [9] * 4, [9] * 2]
        return {
            name: [value for each in found for value in each.values[name]] for name in ("exact match", "parse errors")
        }

    stop, first, atom = (task_token(task, word) for word in (".", "(", "a0"))
    assert cells(solution) == {"exact match": [1.0] * 12, "parse errors": [0.0] * 12}
    # the longest answer fits
    assert cells(lambda row: [first] * 20) == {"exact match": [0.0] * 12, "parse errors": [1.0] * 12}
    assert cells(lambda row: [atom, stop, first]) == {"exact match": [0.0] * 12, "parse errors": [0.0] * 12}
    assert cells(lambda row: [*solution(row)[:-1], atom, stop]) == {
        "exact match": [0.0] * 12,
        "parse errors": [1.0] * 12,
    }


def test_the_deepest_tree_uses_all_atoms():
    batch = next(Expressions((DEEPEST,), test_examples=1).evaluation_batches(1))
    left = solve(Expressions(), asked(None, batch, 0)[0])[0]
    assert sum(word.startswith("a") for word in text(left).split()) == ATOMS


def test_what_is_told():
    task = tasks.resolve("sexpr", tasks.TaskSettings(depth=7, test_examples=3))
    assert task.depths == (7,)
    assert "depth 7" in task.describe()
    names, group = task.token_groups(torch.tensor([0, 6, 7, 14, 15, 46]))
    assert [names[each] for each in group.tolist()] == ["sign", "sign", "head", "head", "atom", "atom"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depths": (1,)}, "depths from 2"),
        ({"depths": ()}, "depths from 2"),
        ({"depths": (25,)}, "depths from 2 to 24"),
        ({"test_examples": 0}, "1 test example"),
        ({"seed": -1}, "seed of at least 0"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ArgumentError, match=words):
        Expressions(**options)


def atoms(tree):
    return {tree} - {"_"} if isinstance(tree, str) else set().union(*map(atoms, tree[1:]))


def nodes(tree):
    return [] if isinstance(tree, str) else [tree, *nodes(tree[1]), *nodes(tree[2])]


def test_a_guess_copies_the_subtree_whose_atoms_are_missing():
    """Its words stand in another order where a head turns them; brackets, the first head and the stop do not."""
    task = Expressions((2, 5, 9), test_examples=30)
    shares = []
    for batch in task.evaluation_batches(30):
        for row in range(len(batch.tokens)):
            prompt, answer = asked(task, batch, row)
            words = task.decode(prompt).split()
            _, left, right = read(words[words.index("(") :])
            (copy,) = (node for node in nodes(left) if atoms(node) == atoms(left) - atoms(right))
            pairs = zip([*text(copy).split(), "."], task.decode(answer).split(), strict=True)
            shares.append(sum(a == b for a, b in pairs) / len(answer))
    assert task.guess().value == pytest.approx(sum(shares) / len(shares))
    assert 0.7 < task.guess().value < 0.9
