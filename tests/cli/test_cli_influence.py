"""``zonal influence`` prints what ``zonal.influence`` says."""

import json

import pytest
from cli.commands import refused, run


def test_a_window_is_told_layer_by_layer_and_drawn(capsys):
    code, out, err = run("influence --window 5 --tokens 32", capsys)
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert [line.split()[2] for line in lines[2:9]] == ["5", "10", "15", "20", "25", "30", "31"]
    assert "7 layers: more of them bring nothing" in lines
    # cells of two tokens: the farthest pair of one is 31, 29, 27 … apart
    assert lines[-1].split() == ["30", *(str(-(-apart // 5)) for apart in range(31, 0, -2))]
    assert len(lines[-2].split()) == 16


def test_a_list_is_what_it_is_with_its_convolution(capsys):
    spec = "regime(prior=('window(left=3)',))*2, mamba2(state=16)"
    code, out, _ = run(f'influence --operator "{spec}" --conv 2 --tokens 20 --json', capsys)
    found = json.loads(out)
    assert code == 0
    assert (found["tokens"], found["layers"]) == (20, 3)
    assert [row["back"] for row in found["reached"]] == [4, 8, 19]
    assert found["reached"][-1]["pairs"] == 1


def test_what_no_layer_reaches_is_a_dot(capsys):
    code, out, _ = run("influence --operator \"regime(prior=('chunk_causal(size=4)',))\" --tokens 8", capsys)
    assert code == 0
    assert out.splitlines()[-1].split() == ["7", "1", "1", "1", "1", "·", "·", "·", "0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 0", "influence: --tokens must be from 1 to 4,096, received 0"),
        ("--window -1", "influence: --window must be from 0 to 4,096, received -1"),
        ("--window 4 --operator sko", "influence: --window replaces --operator, received both"),
        ("--operator softmx", "softmax"),
    ],
)
def test_mistakes_in_one_line(words, message, capsys):
    refused(f"influence {words}", capsys, message)
