"""Every question has one right candidate, found here in WordNet's trees by walks of this file."""

import itertools

import pytest
import torch

from zonal import tasks
from zonal.data import wordnet
from zonal.errors import ArgumentError
from zonal.tasks import Ancestors, Lookup, Paths
from zonal.tasks.relations import RELATIONS, Cell

NOUNS = wordnet.nouns()


def above(node):
    found = set()
    while (node := NOUNS.above[node]) is not None:
        found.add(node)
    return found


def step(nodes, relation, inside):
    """One relation from a set of nodes, read from the tree's lists alone."""
    if relation == "kind-of":
        found = {NOUNS.above[node] for node in nodes}
    elif relation == "has-kind":
        found = {node for node in inside if NOUNS.above[node] in nodes}
    elif relation == "member-of":
        found = {group for node in nodes for group in NOUNS.groups[node]}
    else:
        found = {node for node in inside if set(NOUNS.groups[node]) & nodes}
    return found & inside


def questions(task, tokens, targets):
    """(labels by candidate, [(entity, relations, label)]) of a row, candidates and entities as the source numbers
    them.
    """
    entities = task.vocab_size - task.source.entities
    names = [task.decode([token]) for token in tokens]
    end = names.index("?")
    labels = {tokens[place] - entities: tokens[place + 1] for place in range(0, end, 2)}
    asked = []
    for place in range(end, len(tokens)):
        if names[place] == "?":
            last = next(at for at in range(place + 1, len(tokens)) if targets[at] >= 0)
            asked.append((tokens[place + 1] - entities, names[place + 2 : last + 1], targets[last]))
            assert names[last + 1 : last + 2] in ([], ["?"])
    assert sum(target >= 0 for target in targets) == len(asked)
    return labels, asked


def rows(batches):
    for batch in batches:
        group, size = batch.slices.values()
        yield from zip(batch.tokens.tolist(), batch.targets.tolist(), group, size, strict=True)


@pytest.fixture(scope="module")
def hypernyms():
    return Lookup(Ancestors("carnivore"), pairs=4, questions=3, test_examples=8)


@pytest.fixture(scope="module")
def paths():
    return Lookup(Paths("bovid", most=3), pairs=3, questions=2, test_examples=6)


def test_one_candidate_is_an_ancestor(hypernyms):
    first = NOUNS.under("carnivore").start
    train = itertools.chain.from_iterable(rows([hypernyms.train_batch(step, 8, 0)]) for step in range(6))
    seen = set()
    for tokens, targets, group, distance in itertools.chain(train, rows(hypernyms.evaluation_batches(5))):
        labels, asked = questions(hypernyms, tokens, targets)
        assert len(labels) == len(set(labels.values())) == 4
        assert len({label for _, _, label in asked}) == len(asked) == 3
        for entity, relations, label in asked:
            assert relations == []
            right = [
                node for node in labels if node + first in above(entity + first) or (distance == 0 and node == entity)
            ]
            assert [labels[node] for node in right] == [label]
            assert distance == 0 or NOUNS.ancestors(entity + first)[distance - 1] == right[0] + first
        seen.add((group, distance))
    assert {group for group, _ in seen} == {"trained", "held out"}
    assert min(distance for group, distance in seen if group == "held out") == 2


def test_pairs_held_out_follow_from_trained_ones():
    source = Ancestors("carnivore", closure=0.3)
    trained = {tuple(pair) for cell in source.training for pair in source.pairs(cell).tolist()}
    held = {tuple(pair) for cell in source.tests for pair in source.pairs(cell).tolist()}
    assert held
    assert not held & trained
    parents = {(a, b) for a, b in source.pairs(Cell("trained", 1)).tolist()}
    for node, ancestor in held:
        chain = [
            node,
            *(a - NOUNS.under("carnivore").start for a in NOUNS.ancestors(node + NOUNS.under("carnivore").start)),
        ]
        assert all(pair in parents for pair in itertools.pairwise(chain[: chain.index(ancestor) + 1]))
    widest = len(NOUNS.under("carnivore")) // 8
    assert all(
        NOUNS.ends[ancestor + NOUNS.under("carnivore").start] - NOUNS.under("carnivore").start - ancestor <= widest
        for _, ancestor in held
    )
    more = sum(len(Ancestors("carnivore", closure=0.6).pairs(cell)) for cell in source.training if cell.size > 1)
    assert more > sum(len(source.pairs(cell)) for cell in source.training if cell.size > 1)


def test_held_out_pairs_are_not_trained(hypernyms):
    held = {tuple(pair) for cell in hypernyms.source.tests for pair in hypernyms.source.pairs(cell).tolist()}
    assert held
    for tokens, targets, _, _ in itertools.chain.from_iterable(
        rows([hypernyms.train_batch(step, 16, 3)]) for step in range(20)
    ):
        labels, asked = questions(hypernyms, tokens, targets)
        node = {label: candidate for candidate, label in labels.items()}
        assert not {(entity, node[label]) for entity, _, label in asked} & held


def test_one_candidate_is_at_the_end_of_a_path(paths):
    source = paths.source
    nodes = [next(n for n in range(len(NOUNS.words)) if NOUNS.words[n] == source.word(0))]
    nodes += list(NOUNS.under("bovid"))[1:]
    groups = set()
    waiting = [group for node in nodes for group in NOUNS.groups[node]]
    while waiting:
        group = waiting.pop()
        if group not in groups:
            groups.add(group)
            waiting += NOUNS.groups[group]
    nodes += sorted(groups)
    assert [NOUNS.words[node] for node in nodes] == [source.word(entity) for entity in range(source.entities)]
    place = {node: entity for entity, node in enumerate(nodes)}
    trained = {
        path: set(starts.tolist()) for hops in range(4) for path, starts in source.compositions(Cell("trained", hops))
    }
    found = set()
    train = itertools.chain.from_iterable(rows([paths.train_batch(number, 4, 0)]) for number in range(12))
    for tokens, targets, group, hops in itertools.chain(train, rows(paths.evaluation_batches(4))):
        labels, asked = questions(paths, tokens, targets)
        for entity, relations, label in asked:
            ends = {nodes[entity]}
            for relation in relations:
                ends = step(ends, relation, set(nodes))
            right = [candidate for candidate in labels if candidate in {place[node] for node in ends}]
            assert [labels[candidate] for candidate in right] == [label]
            assert len(relations) == hops
            path = tuple(RELATIONS.index(relation) for relation in relations)
            assert (path in trained) == (group != "unseen")
            if group == "seen":
                assert entity not in trained[path]
            found.add((group, hops))
    assert found >= {("trained", 0), ("trained", 1), ("trained", 3), ("seen", 2), ("unseen", 2), ("unseen", 3)}


def test_compositions_are_divided(paths):
    source = paths.source
    for hops in (2, 3):
        parts = {
            group: {path for path, _ in source.compositions(Cell(group, hops))}
            for group in ("trained", "seen", "unseen")
        }
        assert parts["unseen"]
        assert not parts["unseen"] & (parts["trained"] | parts["seen"])
        assert parts["seen"] <= parts["trained"]
        assert len(parts["unseen"]) == (len(parts["unseen"]) + len(parts["trained"])) // 4
        assert not any(
            (1, 0) in itertools.pairwise(path) or (3, 2) in itertools.pairwise(path)
            for part in parts.values()
            for path in part
        )
        for path, starts in source.compositions(Cell("seen", hops)):
            mine = dict(source.compositions(Cell("trained", hops)))[path]
            assert not set(starts.tolist()) & set(mine.tolist())


@pytest.mark.parametrize("name", ["hypernyms", "paths"])
def test_the_length_is_that_of_the_longest_question(name, request):
    task = request.getfixturevalue(name)
    assert task.length == max(batch.tokens.shape[1] for batch in task.evaluation_batches(64))


class Speaker:
    """A model whose logits are ``say`` of tokens and a row's targets, which it looks up by its tokens."""

    def __init__(self, task, right):
        batches = [*task._of(task.controls, 8, 2), *task._of(task.tests, 8, 1)]
        self.answers = {
            tuple(row): targets
            for batch in batches
            for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
        }
        self.task, self.right = task, right

    def parameters(self):
        return iter([torch.zeros(1)])

    def __call__(self, tokens):
        logits = torch.zeros(*tokens.shape, self.task.vocab_size)
        for row, words in enumerate(tokens.tolist()):
            for place, target in enumerate(self.answers[tuple(words)]):
                if target >= 0 and self.right:
                    logits[row, place, target] = 1.0
                if (
                    target >= 0 and self.right == "second"
                ):  # another label of the context is more likely, and one that is not in it most of all
                    others = [label for label in words[1 : 2 * self.task.pairs : 2] if label != target]
                    logits[row, place, others[0]] = 2.0
                    logits[row, place, next(label for label in range(1, 9) if label not in (target, *others))] = 3.0
        return logits


@pytest.mark.parametrize(
    ("right", "accuracy", "precision"), [(True, 1.0, 1.0), ("second", 0.0, 0.5), (False, 0.0, 0.25)]
)
def test_examination(hypernyms, right, accuracy, precision):
    found = list(hypernyms.examine(Speaker(hypernyms, right), 5))
    cells = {(each.slices["pairs"][0], each.slices["distance"][0]) for each in found}
    assert cells == {(cell.group, cell.size) for cell in (*hypernyms.controls, *hypernyms.tests)}
    assert {value for each in found for value in each.values["accuracy"]} == {accuracy}
    assert {value for each in found for value in each.values["average precision"]} == {precision}


def test_what_is_told(hypernyms, paths):
    trained = [cell for cell in hypernyms.controls if cell.group == "trained"]
    assert hypernyms.guess().value == pytest.approx((1 + (len(trained) - 1) / 4) / len(trained))
    assert "2 to 3, where a guess among the labels in the context is right in 25%" in hypernyms.describe()
    assert "WordNet's tree of carnivore" in hypernyms.describe()
    assert "never seen" in paths.describe()
    assert paths.decode(next(paths.evaluation_batches(1)).tokens[0].tolist()).count("?") == 2
    for task, names in ((hypernyms, {"sign", "label", "entity"}), (paths, {"sign", "label", "relation", "entity"})):
        groups, group = task.token_groups(torch.cat([batch.tokens.flatten() for batch in task.evaluation_batches(8)]))
        assert {groups[each] for each in group.unique().tolist()} == names
    task = tasks.resolve(
        "hypernyms", tasks.TaskSettings(subset="bird", closure=0.1, pairs=6, questions=2, test_examples=3)
    )
    assert (task.source.subset, task.source.closure, task.pairs, task.questions) == ("bird", 0.1, 6, 2)
    assert tasks.resolve("paths", tasks.TaskSettings(subset="bovid", hops=2, pairs=3, questions=1)).source.most == 2
    assert tasks.resolve("hypernyms", tasks.TaskSettings(subset="bird", pairs=4)).questions == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ancestors("unicorns"), "no synset 'unicorns' is shipped"),
        (lambda: Ancestors(closure=1.0), "closure must be at least 0 and below 1"),
        (lambda: Paths(most=5), "hops must be from 1 to 4, got 5"),
        (lambda: Lookup(Ancestors("carnivore"), pairs=1), "at least 2 pairs"),
        (lambda: Lookup(Ancestors("carnivore"), pairs=3, questions=4), "from 1 to as many questions"),
        (lambda: Lookup(Ancestors("carnivore"), pairs=200), "no context of 200 candidates can be drawn"),
        (lambda: Lookup(Ancestors("poodle"), pairs=2, questions=1), "no context of 2 candidates"),
        (lambda: Lookup(Ancestors("carnivore", closure=0.999999)), "from what is tested.* less closure"),
        (lambda: tasks.resolve("hypernyms", tasks.TaskSettings(hops=2)), "takes no hops"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()
