import math

import numpy as np
import pytest
import scipy.stats

from zonal.errors import ArgumentError
from zonal.evaluation import Final, best_learning_rate, difference_within_spread, spread


@pytest.mark.parametrize("n", [2, 3, 5, 11])
def test_spread_agrees_with_scipy(n):
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    low, high = scipy.stats.t.interval(0.95, n - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    got = spread(values.tolist())
    assert (got.n, got.minimum, got.maximum) == (n, values.min(), values.max())
    assert got.mean == pytest.approx(values.mean())
    assert got.deviation == pytest.approx(values.std(ddof=1))
    assert (got.low, got.high) == (pytest.approx(low), pytest.approx(high))


def test_losses_of_a_run_that_diverged_have_a_spread():
    got = spread([1e200, 3e200])
    assert (got.mean, got.deviation) == (2e200, pytest.approx(math.sqrt(2) * 1e200))


def test_one_value_has_no_spread():
    got = spread([2.5])
    assert (got.mean, got.deviation, got.low, got.high) == (2.5, None, None, None)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_spread_refuses(values):
    with pytest.raises(ArgumentError, match="spread"):
        spread(values)


@pytest.mark.parametrize("level", [-0.5, 0.0, 1.0, 95.0, math.nan])
def test_a_level_is_a_share(level):
    with pytest.raises(ArgumentError, match="spread: level must lie between 0 and 1"):
        spread([1.0, 2.0], level=level)


@pytest.mark.parametrize(
    ("offset", "verdict"), [(0.0, "within the spread"), (0.05, "within the spread"), (4.0, "beyond the spread")]
)
def test_difference_is_the_paired_t_test(offset, verdict):
    generator = np.random.default_rng(7)
    a = generator.normal(size=5)
    b = a + generator.normal(scale=0.3, size=5) - offset
    test = scipy.stats.ttest_rel(a, b)
    low, high = test.confidence_interval(0.95)
    got = difference_within_spread(dict(enumerate(a)), dict(enumerate(b)))
    assert (got.low, got.high) == (pytest.approx(low), pytest.approx(high))
    assert got.verdict == verdict
    assert (test.pvalue < 0.05) == (verdict == "beyond the spread")


def test_pairing_sees_what_an_unpaired_test_would_not():
    a = {0: 1.0, 1: 2.0, 2: 3.0}
    b = {0: 1.1, 1: 2.1, 2: 3.11}
    assert difference_within_spread(a, b).verdict == "beyond the spread"
    assert scipy.stats.ttest_ind(list(a.values()), list(b.values())).pvalue > 0.5


def test_only_common_seeds_count():
    got = difference_within_spread({0: 1.0, 1: 9.0}, {0: 0.5, 2: 3.0})
    assert (got.n, got.mean, got.verdict) == (1, 0.5, "not decidable")
    assert difference_within_spread({0: 1.0}, {1: 1.0}).verdict == "not decidable"


def test_equal_values_are_within_the_spread():
    same = {0: 1.0, 1: 1.0, 2: 1.0}
    assert difference_within_spread(same, same).verdict == "within the spread"
    rounded = {0: 0.1 + 0.2, 1: 0.1 + 0.2}
    assert rounded[0] > 0.3  # by rounding
    assert difference_within_spread({0: 0.3, 1: 0.3}, rounded).verdict == "within the spread"
    with pytest.raises(ArgumentError, match="difference_within_spread: values must be finite"):
        difference_within_spread({0: 0.3, 1: math.nan}, rounded)


def best(values, **settings):
    """The best of rates with values of seeds after 100 steps, None where a seed failed."""
    ended = {
        rate: {seed: Final(value, 100) for seed, value in enumerate(each) if value is not None}
        for rate, each in values.items()
    }
    return best_learning_rate(ended, (0, 1), **settings)


def test_best_learning_rate_is_by_mean():
    tried = {1e-3: [0.5, 0.7], 1e-2: [0.9, 0.2], 3e-3: [0.6, 0.65]}
    assert best(tried, higher_is_better=True) == 3e-3
    assert best(tried, higher_is_better=False) == 1e-2


def test_a_rate_that_diverged_is_not_best():
    assert best({1e-3: [0.5, 0.5], 1e-2: [0.99, None]}, higher_is_better=True) == 1e-3
    assert best({1e-3: [0.5, 0.5], 1e-2: [0.99, math.inf]}, higher_is_better=True) == 1e-3
    assert best({1e-3: [None], 1e-2: [0.1]}, higher_is_better=True) == 1e-2
    assert best({1e-3: [None]}, higher_is_better=True) is None


def test_ties_go_to_more_seeds_then_to_the_smaller_rate():
    assert best({3e-3: [1.0], 1e-3: [1.0]}, higher_is_better=True) == 1e-3
    # the third seed does not choose, and shows which rate was chosen
    assert best({3e-3: [1.0, 1.0, 0.0], 1e-3: [1.0, 1.0]}, higher_is_better=True) == 3e-3


def test_beyond_the_stop_the_sooner_rate_is_best():
    tried = {1e-3: {0: Final(0.999, 800)}, 3e-3: {0: Final(0.996, 400)}, 1e-2: {0: Final(0.994, 200)}}
    assert best_learning_rate(tried, (0,), higher_is_better=True, stop=0.995) == 3e-3
    assert best_learning_rate(tried, (0,), higher_is_better=True) == 1e-3


def test_the_validation_set_chooses_where_all_runs_were_measured_on_it():
    def rates(second):
        return {
            1e-3: {0: Final(0.9, 10, 0.5), 1: Final(0.9, 10, 0.5)},
            1e-2: {0: Final(0.1, 10, 0.8), 1: Final(0.1, 10, second)},
        }

    assert best_learning_rate(rates(0.4), (0, 1), higher_is_better=True) == 1e-2
    assert best_learning_rate(rates(0.4), (0, 1), higher_is_better=False) == 1e-3
    assert best_learning_rate(rates(None), (0, 1), higher_is_better=True) == 1e-3
    # at the stop they are equal, and the smaller rate is taken
    assert best_learning_rate(rates(0.4), (0, 1), higher_is_better=True, stop=0.4) == 1e-3
