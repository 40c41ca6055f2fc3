"""Folders of models whose files are damaged or do not belong together are refused by a sentence that says what to do,
in Python and in ``zonal generate``.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_llama import SIZES, word_tokenizer
from tokenizers.processors import TemplateProcessing

from zonal import hf
from zonal.cli.app import main
from zonal.errors import ArgumentError

WEIGHTS = "model.safetensors"


def save(root: Path, name: str, model: Any, vocabulary: int = 40) -> None:
    model.save_pretrained(root / name)
    word_tokenizer(f"w{index}" for index in range(vocabulary)).save_pretrained(root / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model and one of this library."""
    root = tmp_path_factory.mktemp("models")
    converted = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **SIZES))
    hf.convert(converted, "squared_affine", cache="memory")
    save(root, "converted", converted)
    save(root, "own", hf.ZonalForCausalLM(hf.ZonalConfig(vocab_size=40, dim=32, layers="sko, softmax", heads=2)))
    return root


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """config.json with a change."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """The weights with a change."""

    def edit(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def shorter(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5])


NORM = {"converted": "model.norm.weight", "own": "model.core.norm.weight"}


@pytest.mark.parametrize("name", NORM)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shorter, "damaged or truncated; copy it again"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "cannot read the tokeniser in"),
        (weights(lambda found: found.pop(NORM["own" if NORM["own"] in found else "converted"])), "lacks the weight"),
        (weights(lambda found: found.update(other=torch.ones(2))), "beside those of its model, the weight other"),
        (edited(lambda config: config.get("model", config).update(vocab_size=50)), "of shape (40, 32) for (50, 32)"),
    ],
)
def test_weights_that_are_not_those_of_the_config(
    name: str, damage: Callable[[Path], object], said: str, folders: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(folders / name, tmp_path / name)
    damage(tmp_path / name)
    assert main(["generate", "--model", str(tmp_path / name), "--prompt", "w1", "--max-new-tokens", "1"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda zonal: zonal.update(operators=of("sko")), "lacks the weight .*link_weight, and 3 more"),
        (lambda zonal: zonal["operators"].pop(), "an operator for each of 2 layers is required"),
        (lambda zonal: zonal.update(operators=[{}, {}]), "the configuration lacks anchor"),
        (lambda zonal: zonal.update(base="unheard"), "the model was a 'unheard'"),
        (lambda zonal: zonal.pop("cache"), "unknown cache of config.json"),
        (lambda zonal: zonal.update(base="gpt2"), "no class of transformers for a .gpt2."),
    ],
)
def test_a_config_that_was_edited(
    change: Callable[[dict[str, Any]], object], said: str, folders: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders / "converted", tmp_path / "edited")
    edited(lambda config: change(config["zonal"]))(tmp_path / "edited")
    with pytest.raises(ArgumentError, match=said):
        hf.from_pretrained(tmp_path / "edited")


@pytest.mark.parametrize("name", ["PreTrainedModel", "GPT2LMHeadModel", "LlamaConfig", "Nothing"])
def test_a_config_that_names_another_class(name: str, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "converted", tmp_path / "edited")
    edited(lambda config: config.update(architectures=[name]))(tmp_path / "edited")
    with pytest.raises(ArgumentError, match=rf"the class {name}, which is no class of transformers for a 'llama'"):
        hf.from_pretrained(tmp_path / "edited")


def of(spec: str) -> list[dict[str, Any]]:
    """The operators that config.json holds after a conversion."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **SIZES))
    return [operator.config() for operator in hf.convert(model, spec)]


def test_texts_that_a_model_cannot_read(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=32, n_head=2, n_positions=8))
    save(tmp_path, "short", model, vocabulary=90)
    call = ["generate", "--model", str(tmp_path / "short"), "--max-new-tokens", "9", "--prompt"]
    assert main([*call, "w1 w2"]) == 2
    assert "has 8 positions, and the prompt of 2 tokens with 9 new ones needs more" in capsys.readouterr().err
    assert main([*call, "w80"]) == 2
    assert "made token 80, and the model knows 40 tokens" in capsys.readouterr().err
    context = hf.ContextMemory(
        hf.from_pretrained(folders / "converted"), transformers.AutoTokenizer.from_pretrained(tmp_path / "short")
    )
    with pytest.raises(ArgumentError, match="the model knows 40 tokens"):
        context.read("a letter", "w80 w1")
    assert context.contents() == ()


def test_a_tokeniser_that_begins_texts_with_a_token_of_another_model(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = word_tokenizer(f"w{index}" for index in range(90))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w80 $A", special_tokens=[("w80", 80)])
    tokenizer.bos_token = "w80"
    shutil.copytree(folders / "own", tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    assert main(["generate", "--model", str(tmp_path / "own"), "--prompt", "w1 w2", "--max-new-tokens", "1"]) == 2
    assert "made token 80, and the model knows 40 tokens" in capsys.readouterr().err
    context = hf.ContextMemory(transformers.AutoModelForCausalLM.from_pretrained(folders / "own"), tokenizer)
    with pytest.raises(ArgumentError, match="the model knows 40 tokens"):
        context.read("a letter", "w2 w1")


def test_a_tokeniser_that_numbers_texts(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its token_type_ids are of no use for one text, and most decoders take none."""
    shutil.copytree(folders / "own", tmp_path / "own")
    path = tmp_path / "own" / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    call = ["--prompt", "w1 w2", "--max-new-tokens", "3", "--temperature", "0"]
    said = []
    for folder in (folders / "own", tmp_path / "own"):
        assert main(["generate", "--model", str(folder), *call]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_folder_without_the_tokens_of_its_tokeniser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers then makes a tokeniser of GPT-2's kind for which every text is empty."""
    sizes = {"vocab_size": 40, "n_embd": 32, "n_head": 2, "n_positions": 8}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "w1 w2", "--max-new-tokens", "1"]) == 2
    assert "cannot read the tokeniser in" in capsys.readouterr().err


@pytest.mark.parametrize("drawn", [[], ["--temperature", "0"]], ids=["drawn", "likeliest"])
def test_logits_that_are_no_numbers(
    drawn: list[str], folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The likeliest token of NaN would be the first that is NaN."""
    shutil.copytree(folders / "own", tmp_path / "own")
    weights(lambda found: found[NORM["own"]].fill_(float("nan")))(tmp_path / "own")
    assert main(["generate", "--model", str(tmp_path / "own"), "--prompt", "w1", *drawn]) == 2
    assert "received NaN or infinity" in capsys.readouterr().err
