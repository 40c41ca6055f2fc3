"""The laws of o-sets, by enumeration: every stable o-set on two records along three stages that branch, and every pair
of them.
"""

import itertools

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.theory.oset import OSet, Reporter, Verdict

# stage 0 is continued by 1 and by 2, which do not know of each other
STAGES, HISTORIES = (0, 1, 2), ((0, 1), (0, 2))
WAYS = [flags for flags in itertools.product((False, True), repeat=3) if not flags[0] or all(flags)]
"""In which stages a record is accepted: every way that keeps acceptance along both histories."""
A, B, C = (
    OSet(lambda t, place=place: torch.tensor([ways[place][t] for ways in itertools.product(WAYS, repeat=3)]))
    for place in range(3)
)
"""Three stable o-sets whose records are all 125 ways in which three can accept one.

Laws hold record by record, so that these are all o-sets.
"""


def family(table):
    """The o-set that accepts ``table[stage]``."""
    return OSet(lambda stage: torch.tensor(table[stage]))


def stable(oset):
    return all(oset.withdrawn(history) is None for history in HISTORIES)


def same(a, b):
    return all(torch.equal(a.at(stage), b.at(stage)) for stage in STAGES)


def below(a, b):
    """At which records a is refined into b."""
    return torch.stack([~a.at(stage) | b.at(stage) for stage in STAGES]).all(0)


def test_there_are_as_many_ways_as_counted_by_hand():
    assert len(WAYS) == 5
    assert A.at(0).shape == (125,)
    assert all(stable(x) for x in (A, B, C))


def test_join_and_meet_are_the_least_upper_and_greatest_lower_bounds():
    join, meet = A.join(B), A.meet(B)
    assert stable(join)
    assert stable(meet)
    assert all(meet.refines(x, STAGES) and x.refines(join, STAGES) for x in (A, B))
    above, under = below(A, C) & below(B, C), below(C, A) & below(C, B)
    assert 0 < above.sum() < 125
    assert bool((~above | below(join, C)).all())
    assert bool((~under | below(C, meet)).all())


def test_join_and_meet_make_a_distributive_lattice():
    assert same(A.meet(B.join(C)), A.meet(B).join(A.meet(C)))
    assert same(A.join(B.meet(C)), A.join(B).meet(A.join(C)))
    assert same(A.join(B.join(C)), A.join(B).join(C))
    assert same(A.join(A.meet(B)), A)
    assert same(A.meet(A.join(B)), A)
    assert not same(A.join(B), A.meet(B))


def test_refinement_is_a_preorder_and_mutual_refinement_is_equality_of_answers():
    assert A.refines(A, STAGES)
    assert not A.refines(B, STAGES)
    assert bool((~(below(A, B) & below(B, C)) | below(A, C)).all())
    equal = torch.stack([A.at(stage) == B.at(stage) for stage in STAGES]).all(0)
    assert torch.equal(below(A, B) & below(B, A), equal)


def test_a_product_accepts_pairs_and_keeps_stability():
    both = A.product(B)
    assert stable(both)
    for stage in STAGES:
        assert torch.equal(both.at(stage), A.at(stage)[:, None] & B.at(stage)[None, :])


def test_generators_log_and_the_protocol_answers():
    logs = [lambda t: torch.tensor([t >= 1, False, False]), lambda t: torch.tensor([False, t >= 2, t >= 2])]
    oset = OSet.generated(logs, lambda t: torch.tensor([True, True, False]))
    assert [oset.at(t).tolist() for t in range(3)] == [[False] * 3, [True, False, False], [True, True, False]]


def test_only_what_is_decided_at_once_has_a_complement():
    """A stable o-set whose answer is always the other's opposite: there is one for constant ways, and for no other."""
    for way in WAYS:
        assert (tuple(not x for x in way) in WAYS) == (len(set(way)) == 1)


def test_a_withdrawal_is_found_where_it_happens():
    found = family([[True, True], [True, True], [False, True], [False, False]]).withdrawn(range(4))
    assert found is not None
    assert found.place == 2
    assert found.records.tolist() == [True, False]


def test_a_report_keeps_its_word_when_its_labels_exclude_each_other():
    reporter = Reporter(A, B)
    assert stable(reporter.decided)
    assert not reporter.exclusive(STAGES)
    for history in HISTORIES:
        before, after = (reporter.report(stage).int() for stage in history)
        lost = (before != Verdict.UNDECIDED) & (after != before)
        both = torch.stack([A.at(stage) & B.at(stage) for stage in history]).any(0)
        # the only way to lose a verdict is that both labels come to accept it; then it is undecided, and never the
        # rival's
        assert bool(lost.any())
        assert not bool((lost & ~both).any())
        assert bool((after[lost] == Verdict.UNDECIDED).all())


def test_reports_by_hand():
    reporter = Reporter(family([[True, False, False, True]]), family([[False, True, False, True]]))
    assert reporter.report(0).tolist() == [Verdict.ACCEPTED, Verdict.CONTRADICTED, Verdict.UNDECIDED, Verdict.UNDECIDED]
    assert reporter.report(0).dtype == torch.int8


def test_consistency_with_what_is_reported_on():
    subject = family([[False, False], [True, False], [True, False]])
    assert Reporter(subject, family([[False, False]] * 3)).consistent(subject, STAGES)
    assert not Reporter(family([[True, False]] * 3), family([[False, True]] * 3)).consistent(subject, STAGES)
    assert not Reporter(subject, family([[True, False]] * 3)).consistent(subject, STAGES)


def test_certified_stages_are_classical_and_need_decoded_exclusivity():
    """Three records of two elements, records 0 and 1 of the same: every report of them."""
    decode, certified, confused = torch.tensor([0, 0, 1]), 0, 0
    for yes, no in itertools.product(itertools.product((False, True), repeat=3), repeat=2):
        reporter = Reporter(family([yes]), family([no]))
        by_element = [(any(yes[:2]), any(no[:2])), (yes[2], no[2])]
        assert reporter.certified(0, decode) == all(a != b for a, b in by_element)
        if reporter.certified(0, decode):
            certified += 1
            members, others = reporter.partition(0, decode)
            assert torch.equal(members, ~others)
            assert members.tolist() == [a for a, _ in by_element]
        elif reporter.exclusive([0]) and all(a or b for a, b in by_element):
            confused += 1  # no record has both labels, and an element has
    assert (certified, confused) == (12, 4)


def test_what_is_not_two_valued_is_not_made_so():
    decode = torch.tensor([0, 0, 1])
    with pytest.raises(ArgumentError, match=r"element 1 is undecided. Wait for a later stage"):
        Reporter(family([[True, False, False]]), family([[False] * 3])).partition(0, decode)
    with pytest.raises(ArgumentError, match=r"element 0 has records of both labels. Decode them"):
        Reporter(family([[True, False, True]]), family([[False, True, False]])).partition(0, decode)
    with pytest.raises(ArgumentError, match=r"reach every element from 0 to 2, received only \[0, 2\]"):
        Reporter(family([[True] * 3]), family([[False] * 3])).certified(0, torch.tensor([0, 0, 2]))
    with pytest.raises(ArgumentError, match="one element for each"):
        Reporter(family([[True] * 3]), family([[False] * 3])).certified(0, torch.tensor([0.0, 1.0, 2.0]))


def test_bad_o_sets():
    a, b = family([[True, False]]), family([[True]])
    with pytest.raises(
        ArgumentError, match=r"OSet.join: both must be on the same records.*\(2,\) and \(1,\).*Use product"
    ):
        a.join(b).at(0)
    with pytest.raises(ArgumentError, match="Compare evidence with a threshold"):
        OSet(lambda stage: torch.ones(2)).at(0)
    with pytest.raises(ArgumentError, match="at least one generator"):
        OSet.generated([], lambda stage: torch.ones(2, dtype=torch.bool))
    logs = [lambda stage, n=n: torch.ones(n, dtype=torch.bool) for n in (2, 1)]
    for generators, protocol in ((logs, logs[0]), (logs[:1], logs[1])):
        with pytest.raises(ArgumentError, match=r"OSet\.generated: both must be on the same records"):
            OSet.generated(generators, protocol).at(0)
