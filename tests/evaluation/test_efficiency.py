import math

import pytest

from zonal.evaluation import common_target, tokens_to


@pytest.mark.parametrize(
    ("curve", "target", "expected"),
    [
        ([(100, 4.0), (200, 2.0), (400, 1.0)], 3.0, 150.0),
        ([(100, 4.0), (200, 2.0), (400, 1.0)], 2.0, 200.0),
        ([(100, 4.0), (200, 2.0), (400, 1.0)], 1.5, 300.0),
        ([(100, 4.0), (200, 2.0)], 1.9, None),
        ([(100, 1.0)], 1.0, 100.0),  # good from the start: no earlier point to draw a line from
        ([(100, 3.0), (200, 1.0), (300, 3.0), (400, 1.0)], 2.0, 150.0),
        ([(0, math.nan), (100, 4.0), (150, math.inf), (200, 2.0)], 3.0, 150.0),  # of finite losses only
        ([(0, math.nan), (10, 1.0)], 2.0, 10.0),
        ([], 2.0, None),
    ],
)
def test_tokens_to_a_loss(curve, target, expected):
    assert tokens_to(curve, target) == (None if expected is None else pytest.approx(expected))


def test_the_target_is_reached_by_all():
    curves = [[(1, 5.0), (2, 2.0), (3, 2.5)], [(1, 4.0), (2, 3.0)]]
    assert common_target(curves) == 3.0
    assert all(tokens_to(curve, 3.0) is not None for curve in curves)
    assert common_target([]) is None
    assert common_target([[(1, 2.0)], []]) is None
    assert common_target([[(0, math.nan), *curves[0]], curves[1]]) == 3.0
    assert common_target([[(1, 2.0)], [(0, math.nan)]]) is None
