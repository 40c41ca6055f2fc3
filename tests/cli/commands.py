"""Commands in this process: what they return and print, and mistakes in them."""

import shlex

import pytest

from zonal.cli.app import main


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line."""
    code = main(shlex.split(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(words: str, capsys: pytest.CaptureFixture[str], message: str) -> None:
    """A mistake ends with 2 and is told in one line."""
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("zonal: ")
    assert err.count("\n") == 1
