"""`zonal bench fidelity`: that it runs, resumes, says what is promised, draws, and measures what a model's layers are
given.
"""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file
from small_llama import SIZES
from torch import nn

import zonal
from benchmarks import captured, common, fidelity, fidelity_picture
from zonal import mechanisms
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import ModelConfig, build
from zonal.nn import Attention


def test_fidelity_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every map in one small panel, a page that holds every number, and the files it reads."""
    out = tmp_path / "fidelity.json"
    assert fidelity.main(["--quick", "--length", "24", "--dims", "4", "--eps", "1", "--out", str(out)]) == 0
    value = json.loads(out.read_text())
    families = {row["family"] for row in value["rows"]}
    assert {"reference", "SLAY: anchors", "learned exponentials", "p(x)² + c, random angles"} <= families
    for row in value["rows"]:
        if row["family"] != "reference":
            assert row["m"] > 0
            assert row["causal"]["error"] > 0
            assert row["causal"]["unsafe"] == 0 or not row["positive"]
    fitted = next(
        row for row in value["rows"] if row["family"] == "p(x)² + c, random angles" and row["label"] == "degree 4"
    )
    mean = next(row for row in value["rows"] if row["family"] == "reference")["average"]["causal"]
    assert fitted["causal"]["error"] < mean / 3
    page = out.with_suffix(".html").read_text()
    assert page.count("<tr data-panel=") == len(value["rows"]) - 1  # the reference has no row of its own
    assert "mean of all values" in capsys.readouterr().out


def test_a_quick_run_replaces_no_result() -> None:
    """Of any benchmark: it writes only where it is told to."""
    for words, expected in ([], "results/benchmarks/x.json"), (["--quick"], "-"), (["--quick", "--out", "y"], "y"):
        options = common.parser("", "x").parse_args(words)
        common.prepare(options)
        assert options.out == expected


def quick(out: Path, *words: str) -> list[dict[str, Any]]:
    """Rows of a quick sweep."""
    assert fidelity.main(["--quick", "--length", "24", "--learn", "0", "--out", str(out), "--page", "-", *words]) == 0
    return json.loads(out.read_text())["rows"]


def test_fidelity_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels measured in the same way are kept, others are added or measured again; what was written before a stop
    stands.
    """
    out = tmp_path / "x.json"
    first = quick(out, "--dims", "4", "--eps", "1")
    points = fidelity.point
    monkeypatch.setattr(fidelity, "point", lambda *arguments: pytest.fail("it measured again"))
    assert quick(out, "--dims", "4", "--eps", "1", "--resume") == first
    with pytest.raises(pytest.fail.Exception, match="it measured again"):
        quick(out, "--dims", "3", "--eps", "1", "--resume")
    monkeypatch.setattr(fidelity, "point", points)
    both = quick(out, "--dims", "3", "--eps", "1", "--resume")
    assert [row for row in both if row["dim"] == 4] == first
    assert [row["dim"] for row in both if row["family"] == "reference"] == [3, 4]
    trained = quick(out, "--dims", "4", "--eps", "1", "--resume", "--learn", "1")
    assert any(row["family"] == "learned exponentials" and row["dim"] == 4 for row in trained)
    assert [row for row in trained if row["dim"] == 3] == [row for row in both if row["dim"] == 3]
    record = json.loads(out.read_text())
    out.write_text(json.dumps({**record, "device": {**record["device"], "threads": 1000}}))
    with pytest.raises(ArgumentError, match="another number of threads"):
        quick(out, "--dims", "4", "--eps", "1", "--resume")
    out.write_text("{}")
    with pytest.raises(FileFormatError, match="'settings' is missing"):
        quick(out, "--dims", "4", "--eps", "1", "--resume")


def test_fidelity_says_which_promises_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = quick(tmp_path / "x.json", "--dims", "8", "--eps", "1")
    (said,) = json.loads((tmp_path / "x.json").read_text())["summary"]["claims"]
    fitting = [
        row["causal"]["error"] for row in rows if row["family"] != "reference" and row["m"] <= 512 and row["positive"]
    ]
    assert said["error"] == min(fitting)
    assert said["met"] == (said["error"] <= 0.1)
    assert "recommended, d = 8, eps = 1, iid, causal:" in capsys.readouterr().out
    # signed maps, larger maps and other data prove nothing; a worse map breaks the promise
    row = {
        "family": "x",
        "label": "y",
        "input": "iid",
        "dim": 32,
        "eps": 0.01,
        "m": 600,
        "positive": True,
        "causal": {"error": 0.24},
    }
    assert [found["met"] for found in fidelity.claims([row])] == [True]
    assert [found["met"] for found in fidelity.claims([{**row, "causal": {"error": 0.26}}])] == [False]
    for other in ({"m": 601}, {"positive": False}, {"input": "peaked"}, {"eps": 1.0}, {"dim": 16}):
        assert fidelity.claims([{**row, **other}]) == []


def test_the_picture_of_fidelity(tmp_path: Path) -> None:
    """Well-formed, the same each time, and with a marker for each measured size of what it shows."""
    picture = tmp_path / "x.svg"
    rows = quick(tmp_path / "x.json", "--dims", "8", "--eps", "1", "--picture", str(picture))
    text = picture.read_text()
    assert text == fidelity_picture.svg(rows)
    tree = ElementTree.fromstring(text)
    markers = [path for path in tree.iter("{http://www.w3.org/2000/svg}path") if path.get("transform")]
    families = {curve.family for curve in fidelity_picture.CURVES}
    assert len(markers) == len(fidelity_picture.CURVES) + sum(row["family"] in families for row in rows)
    assert {"d = 8", "Independent directions, ε = 1"} <= {element.text for element in tree.iter()}
    with pytest.raises(ArgumentError, match="no panel of these rows"):
        fidelity_picture.svg([row for row in rows if row["family"] != "reference"])


def test_axes_of_the_picture() -> None:
    axis = fidelity_picture.Axis(10, 1000, 200)
    assert axis.at(100) == pytest.approx(100)
    assert axis.ticks((1, 3)) == pytest.approx([10, 30, 100, 300, 1000])
    assert fidelity_picture.Axis(0.02, 0.5, 1).ticks((1, 3)) == pytest.approx([0.03, 0.1, 0.3])


def test_table_10_runs(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert fidelity.main(["--preset", "slay-table10", "--quick", "--out", str(out), "--page", "-"]) == 0
    rows = json.loads(out.read_text())["rows"]
    anchors = [row for row in rows if row["family"] == "SLAY: anchors"]
    assert [(row["m"], row["paper"], row["length"]) for row in anchors] == [(128, 0.6626, 128)] * 2
    assert all(row["paper"] is None for row in rows if row["family"] == "x² alone")


def test_fidelity_of_a_model(tmp_path: Path) -> None:
    """What hooks collect is what the layers' operators are given: grouped heads, norms and rotary positions
    included.
    """
    for rotary, norms in ((True, True), (True, False), (False, True), (False, False)):
        config = ModelConfig(
            vocab_size=31,
            dim=16,
            layers=("softmax", "squared_affine"),
            heads=4,
            kv_heads=2,
            rotary=rotary,
            qk_norm=norms,
        )
        model = build(config, seed=0).double().eval()
        tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0))
        found = captured.of_layers(model, tokens)
        assert len(found) == 2
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        outputs: dict[nn.Module, torch.Tensor] = {}

        def keep(
            module: nn.Module, inputs: object, output: torch.Tensor, outputs: dict[nn.Module, torch.Tensor] = outputs
        ) -> None:
            outputs[module] = output

        for layer in layers:
            layer.register_forward_hook(keep)
        with torch.no_grad():
            model(tokens)
            for layer, (q, k, v) in zip(layers, found, strict=True):
                assert q.shape == k.shape == v.shape == (2, 4, 9, 4)
                y = zonal.attention(q, k, v, layer.operator.for_heads(4), causal=True)
                assert torch.allclose(layer._read_out(y), outputs[layer], atol=1e-12)


def test_fidelity_of_a_model_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its layers attend with, key heads repeated, and its own attention goes on as it would."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, vocab_size=32)
    whole = transformers.LlamaForCausalLM(config).eval()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "the": 1, "of": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save_pretrained(tmp_path / "small")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "small")
    text = captured.novel()
    ids = torch.tensor(words.encode(text[len(text) // 2 :][:140]).ids[:14]).view(2, 7)
    given: list[torch.Tensor] = []
    for layer in whole.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    with torch.no_grad():
        whole(ids)
    found = captured.samples(tmp_path / "small", 7, [3, 1])
    assert [name for name, _, _ in found] == ["small, layer 3", "small, layer 1"]
    assert found[0][1].q.shape == found[0][1].k.shape == (4, 7, 8)
    assert torch.equal(found[0][1].k[0], found[0][1].k[1])
    assert torch.allclose(found[0][1].q.norm(dim=-1), torch.ones(4, 7, dtype=torch.float64))
    recorded = captured.of_transformers(tmp_path / "small", 7)
    for (q, k, v), wanted in zip(recorded, given, strict=True):
        y = zonal.attention(q, k, v, mechanisms.softmax(), causal=True)
        assert torch.allclose(y.transpose(1, 2).flatten(2), wanted, atol=1e-5)
    with pytest.raises(ArgumentError, match="--layers must be from 1 to 3, received 4"):
        captured.samples(tmp_path / "small", 5, [4])
    with pytest.raises(ArgumentError, match="more than the middle of the novel has tokens for"):
        captured.samples(tmp_path / "small", 10**6)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArgumentError, match=r"which the package transformers reads .* pip install transformers"):
        captured.samples(tmp_path / "small", 5)


def test_fidelity_of_files(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    path = tmp_path / "qkv.safetensors"
    save_file({name: torch.randn(2, 20, 4, generator=draw) for name in "qkv"}, path)
    ((name, data, seen),) = captured.samples(path, 512)
    assert (name, data.q.shape, seen.q.shape) == ("qkv", (2, 10, 4), (2, 10, 4))
    assert not torch.equal(data.q, seen.q)
    assert torch.allclose(data.k.norm(dim=-1), torch.ones(2, 10, dtype=torch.float64))
    out = tmp_path / "out.json"
    assert fidelity.main(["--quick", "--checkpoint", str(path), "--out", str(out), "--page", "-"]) == 0
    assert {row["input"] for row in json.loads(out.read_text())["rows"]} == {"qkv"}
    save_file({name: torch.zeros(2, 20, 4 + (name == "k")) for name in "qkv"}, path)
    with pytest.raises(FileFormatError, match=r"must be \(H, T >= 4, d\)"):
        captured.samples(path, 512)
    path.write_bytes(b"no tensors")
    with pytest.raises(FileFormatError, match="cannot be read"):
        captured.samples(path, 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dims", "8,one"], "--dims takes numbers > 1"),
        (["--eps", "0"], "--eps takes numbers > 0"),
        (["--inputs", "flat"], "--inputs takes iid"),
        (["--seeds", "0"], "--seeds must be >= 1"),
        (["--device", "meta"], "Leave --device out"),
        (["--eps", "-1"], "--eps takes numbers > 0"),
        (["--eps", "inf"], "--eps takes numbers > 0"),
        (["--layers", "0"], "--layers takes numbers > 0"),
        (["--learn", "-1"], "--learn must be >= 0"),
        (["--preset", "slay-table10", "--resume"], "is measured as a whole"),
    ],
)
def test_fidelity_refuses(words: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fidelity.main(["--quick", *words, "--out", "-", "--page", "-"])
