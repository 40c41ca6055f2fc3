"""An operator by the names of its parts: every mechanism has its line, and the line gives the operator."""

from dataclasses import dataclass

import pytest
import torch
from matrix import OPERATORS

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError


def test_every_operator_of_the_matrix_can_be_written_and_read():
    for name in sorted(OPERATORS.keys() - {"polynomial_square"}):
        operator = OPERATORS[name]()
        spec = m.regime_spec(operator)
        again = m.resolve(spec)
        assert m.declaration(again) == m.declaration(operator), name
        assert m.regime_spec(again) == spec, name
        assert again.spec == spec, name


def test_a_regime_is_the_operator_of_its_parts():
    q, k, v = torch.randn(3, 2, 4, 9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)
    for spec, same in (
        ("regime", m.softmax()),
        ("regime(score='cosine(temperature=0.1, learn_temperature=True)')", m.cosine()),
        ("regime(link='identity', anchor='raw', prior=('decay',))", m.retention()),
    ):
        assert torch.equal(
            zonal.attention(q, k, v, m.resolve(spec), causal=True), zonal.attention(q, k, v, same, causal=True)
        )


def test_a_feature_map_stands_for_its_score():
    operator = m.regime(score="learned_exp(size=8)", link="identity")
    assert m.declaration(operator) == m.declaration(m.hedgehog(size=8))


@pytest.mark.parametrize(
    ("anchor", "readout", "start"),
    [
        ("row", None, "default"),
        ("count", "head", "default"),
        ("raw", "head", "default"),
        ("ridge", None, "default"),
        ("koopman(power=1)", None, "orthogonal"),
    ],
)
def test_layers_do_what_the_anchor_needs(anchor, readout, start):
    operator = m.regime(score="cosine", anchor=anchor)
    assert (operator.readout, operator.layer_init) == (readout, start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"link": "yat"}, "link Yat is defined on \\[-1, 1\\] and score Dot can leave it"),
        ({"link": "identity"}, "may be negative and cancel"),
        ({"score": "cosin"}, "unknown operator 'cosin'. Did you mean 'cosine'"),
        ({"anchor": "ridge(epsilon=1)"}, "unknown argument 'epsilon'. Did you mean 'eps'"),
        ({"anchor": "ridge(eps=-1.0)"}, "eps \\(the ridge\\) must be > 0"),
        ({"score": "negative_distance(metric='euclid')"}, "metric must be a metric such as metric.Sphere"),
        ({"prior": "alibi"}, "prior must be a tuple of texts"),
        ({"rank": 0}, "regime: rank must be a whole number >= 1"),
        ({"readout": "heads"}, "readout must be"),
        ({"layer_init": "zeros"}, "layer_init must be 'auto', 'default'"),
        ({"score": 3}, "score must be text such as"),
    ],
)
def test_parts_that_are_none(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        m.regime(**arguments).bind(2, 2)


def test_parts_of_a_users_own_have_no_name():
    @dataclass(frozen=True)
    class Mine(zonal.link.Link):
        def value(self, x, c):
            return 1 + x.square()

    with pytest.raises(ArgumentError, match=r"unknown operator|no spec can name"):
        m.regime_spec(m.softmax().replace(link=Mine()))
