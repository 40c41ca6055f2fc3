"""`zonal bench convert`: its forms of attention, its differences, its page; and all of it on a tiny model where
transformers is installed.
"""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import captured, convert, page
from zonal import mechanisms
from zonal.errors import ArgumentError


def queries(length: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k (1, 4, 40, 8), whose rows all have one length a head."""
    drawn = torch.randn(2, 1, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    return tuple(
        length * torch.nn.functional.normalize(drawn, dim=-1) * torch.tensor([1.0, 0.5, 2.0, 1.5]).view(4, 1, 1)
    )  # type: ignore[return-value]


def test_forms_on_keys_of_one_length() -> None:
    """There the cosine form is softmax, and the paper's is not, nor is it nearer at any of the factors tried."""
    q, k = queries()
    temperatures = convert.matched(q, k, 8**-0.5)
    meant = convert.attention_weights(mechanisms.softmax(), q, k)
    assert torch.allclose(meant.sum(-1), torch.ones(1, 4, 40), atol=1e-5)
    assert meant.triu(1).abs().max() == 0
    cosine, paper = mechanisms.cosine().for_heads(4), convert.arccos().for_heads(4)
    convert.set_temperatures(cosine, temperatures)
    assert torch.allclose(convert.attention_weights(cosine, q, k), meant, atol=1e-5)
    unit = [torch.nn.functional.normalize(x, dim=-1) for x in (q, k)]
    for factor in convert.FACTORS:
        convert.set_temperatures(paper, 2**0.5 * temperatures / factor)
        got = convert.attention_weights(paper, q, k)
        logits = -(unit[0] @ unit[1].mT).clamp(-1, 1).acos() * factor / (2**0.5 * temperatures.view(4, 1, 1))
        assert torch.allclose(
            got, logits.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf")).softmax(-1), atol=1e-3
        )
        assert (got - meant).norm(dim=(-2, -1)).mean() > 0.1


def test_differences_and_their_spread() -> None:
    base = torch.linspace(2, 4, 12, dtype=torch.float64)
    assert convert.differences(base, base) == (0, 0, 0)
    change, low, high = convert.differences(base, base + 0.1 * torch.linspace(0, 2, 12, dtype=torch.float64))
    assert 0 < low < change < high


def test_windows_are_whole_and_apart() -> None:
    text = " ".join(str(n) for n in range(4000))
    found = convert.windows(text, lambda piece: {"input_ids": [int(word) for word in piece.split()]}, 4, 9)
    assert found.shape == (4, 9)
    assert (found[:, 1:-1].diff() == 1).all()
    assert (found[1:, 0] > found[:-1, -1]).all()
    with pytest.raises(ArgumentError, match="texts that hold 400 windows of 99 tokens are required"):
        convert.windows(text, lambda piece: {"input_ids": piece.split()}, 400, 99)


def test_page(tmp_path: Path) -> None:
    value = {
        "device": {"name": "a processor", "threads": 1},
        "load_per_core": 0.5,
        "versions": {"torch": "2"},
        "date": "2030-01-02T00:00:00",
    }
    page.write(
        tmp_path / "x.md",
        "Title",
        ["One.", "Two."],
        [page.Table("Numbers", "Of things.", ["a", "b"], [["1", "2"], ["3", ""]])],
        value,
        "zonal bench x",
    )
    text = (tmp_path / "x.md").read_text()
    assert text.startswith(
        "# Title\n\nOne.\n\nTwo.\n\na processor, 1 thread, load 0.5 a core when it began; torch 2; 2030-01-02.\n"
    )
    assert "## Numbers\n\nOf things.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |  |\n" in text


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a run on a model of two layers."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    config = modeling.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
    )

    def opened(call: str, path: Path, implementation: str) -> tuple[Any, Any]:
        return modeling.LlamaForCausalLM(config).eval(), lambda text: {
            "input_ids": [ord(letter) % 128 for letter in text]
        }

    monkeypatch.setattr(captured, "opened", opened)
    return ["--model", "tiny.gguf", "--length", "24", "--windows", "2"]


def test_a_tiny_model(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "convert.json"
    assert convert.main([*tiny, "--steps", "2", "--out", str(out)]) == 0
    value = json.loads(out.read_text())
    found = {row["form"]: row for row in value["rows"] if row["part"] == "perplexity"}
    assert abs(found[convert.EXACT]["difference"]) < 1e-3
    assert all(
        abs(found[form]["difference"]) > 1e-2
        for form in (convert.COSINE, convert.ARCCOS, convert.PLAIN, convert.WITNESS)
    )
    trained = {row["form"]: row for row in value["rows"] if row["part"] == "trained"}
    assert trained[convert.GATES]["parameters"] == trained[convert.CONTROL]["parameters"] == 2 * 4 * 6
    assert all(row["difference"] != 0 for row in trained.values())
    errors = {row["form"]: row["error"] for row in value["rows"] if row["part"] == "attention"}
    assert errors[convert.EXACT] < 1e-4 < errors[convert.ARCCOS]
    text = out.with_suffix(".md").read_text()
    assert all(form in text for form in (*found, *trained))
    assert "zonal bench convert --threads 1 --model tiny.gguf" in text
    assert "holds" in capsys.readouterr().out


def test_resume_refuses_other_steps(tiny: list[str], tmp_path: Path) -> None:
    words = [*tiny, "--out", str(tmp_path / "convert.json")]
    assert convert.main([*words, "--steps", "1"]) == 0
    with pytest.raises(ArgumentError, match=r"holds results of other settings: steps is 1 there and 2 here"):
        convert.main([*words, "--steps", "2", "--resume"])
    assert convert.main([*words, "--steps", "1", "--resume"]) == 0
