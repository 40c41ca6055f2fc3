"""The page of what the heads of a model score: its numbers are those that are given, and what it draws can be read
back.
"""

import base64
import json
import math
import re

import pytest
import torch

from zonal.report.heads import Heads, scaled, write
from zonal.report.table import Grid

T = 6


def head(share):
    return {
        "rows": 0.2,
        "gauge": 0.1,
        "columns": 0.3,
        "interaction": 0.5,
        "explained": [share / 2, share],
        "spectrum": [0.75, 0.25],
        "uniform": 1.0,
        "by_columns": 0.5,
        "by_rank": [0.2, 0.1],
        "refined": [0.1, 0.05],
    }


def given(**changes):
    layers = [
        {"layer": 1, "operator": "softmax", "refused": None, "heads": [head(0.6), head(0.9)], "ledger": []},
        {"layer": 2, "operator": "sko", "refused": "the kernel of sko may be negative", "heads": [], "ledger": []},
        {"layer": 3, "operator": "regime(anchor='count')", "refused": None, "heads": [head(0.4)], "ledger": []},
    ]
    found = {"model": "runs/mine", "sequences": 2, "tokens": T, "ranks": [1, 3], "layers": layers}
    scores = torch.arange(T * T, dtype=torch.float64).view(T, T).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
    maps = {
        name: {kind: scores - 8 for kind in ("evidence", "interaction", "product", "weights")}
        for name in ("1.1", "1.2", "3.1")
    }
    grid = Grid(("head", "gauge"), (("1.1", "20.0%"),))
    values = {
        "found": found,
        "shares": grid,
        "nats": grid,
        "maps": maps,
        "tokens": ["a", "<b>", "</script>", "d", "e", "f"],
        "ledgers": {"softmax": "all & everything"},
        "command": "zonal explain --model runs/mine --out page.html",
    }
    return Heads(**{**values, **changes})


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write(tmp_path_factory.mktemp("page") / "page.html", given()).read_text()


def test_it_says_what_was_found(page):
    assert (
        "On average over 3 heads 20% of the evidence is the queries&#39; own, 30% the keys&#39; own, and 50% "
        "interaction of queries with keys. 10% does not change the weights (gauge)" in page
    )
    assert "explains from 40% (head 3.1) to 90% (head 1.2)" in page
    assert "Layer 2 is left out: the kernel of sko may be negative." in page
    assert "all &amp; everything" in page
    assert "zonal explain --model runs/mine --out page.html" in page
    assert page.count("<canvas") == 12


def test_it_needs_no_network_and_no_token_closes_its_script(page):
    own = page[: page.index('id="plotly"')]
    assert "http" not in re.sub(r"https?://www.w3.org", "", own)
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert drawn["tokens"] == ["a", "<b>", "</script>", "d", "e", "f"]
    assert [each["name"] for each in drawn["heads"]] == ["1.1", "1.2", "3.1"]
    assert drawn["heads"][0]["spectrum"] == [0.75, 0.25]


@pytest.mark.parametrize("kind", ["evidence", "interaction"])
def test_levels_give_the_numbers_back(kind):
    """To a two-hundredth of the range, with what is forbidden apart; signed maps have their middle at 0."""
    values = torch.randn(T, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0, 3] = -math.inf
    found = scaled(kind, values)
    levels = torch.frombuffer(bytearray(base64.b64decode(found["levels"])), dtype=torch.uint8).view(T, T).double()
    assert (levels[0, 3] == 255) == (levels == 255).any()
    back = found["low"] + levels / 254 * (found["high"] - found["low"])
    inside = ~values.isneginf()
    assert (back - values)[inside].abs().max() <= (found["high"] - found["low"]) / 500
    assert (found["low"] == -found["high"]) == found["signed"] == (kind == "interaction")


def test_maps_without_a_difference_are_drawn():
    flat = scaled("evidence", torch.zeros(2, 2))
    assert (flat["low"], flat["high"]) == (0, 0)
    assert scaled("weights", torch.full((2, 2), -math.inf))["levels"] == base64.b64encode(b"\xff" * 4).decode()
