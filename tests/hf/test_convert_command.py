"""`zonal convert` on a small model: the error of attention falls, the state resumes to the same numbers, what is
written loads and generates, and what is refused.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_llama import SIZES, save_model_of, word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zonal import hf
from zonal.cli.app import main
from zonal.data.corpora import novel
from zonal.errors import ArgumentError, FileFormatError
from zonal.hf import distil, pipeline
from zonal.hf.examine import by_position, nats, needle, pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokeniser, and a text."""
    root = tmp_path_factory.mktemp("pretrained")
    text = novel()[:60_000]
    save_model_of(text, root / "model", num_hidden_layers=4)
    (root / "text.txt").write_text(text)
    return root


def words(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        "convert", str(folder / "model"), "--text", str(folder / "text.txt"), "--out", str(out),
        "--operator", "hedgehog", "--length", "64", "--transfer-rate", "2e-2", "--windows", "2", "--eval-length", "64",
        "--questions", "1", "--transfer-steps", "60", "--distil-steps", "4", *more,
    ]  # fmt: skip


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is measured after short contexts."""
    monkeypatch.setattr("zonal.hf.pipeline._LENGTHS", (8, 16))
    monkeypatch.setattr("zonal.hf.pipeline._PREFILL", 16)


def test_a_model_is_converted_and_goes_on_elsewhere(
    folder: Path, tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "converted"
    assert main(words(folder, out)) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert sorted(operator.name for operator in hf.operators(model)) == ["hedgehog"] * 2 + ["softmax"] * 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = tokenizer("The old house", return_tensors="pt")
    found = model.generate(**tokens, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert isinstance(found[hf.CACHE], hf.MemoryCache)
    record = json.loads((out / "conversion.json").read_text())
    errors = [each["losses"]["error"] for each in record["transfer"]]
    alike = errors[: len(errors) * 3 // 4]  # on windows of half the length
    assert sum(alike[-5:]) < 0.95 * sum(alike[:5])
    assert len(record["chosen"]) == 2
    assert record["chosen"] == sorted(sorted(range(4), key=record["harms"].__getitem__)[:2])
    text = distil.Text.of([tokenizer((folder / "text.txt").read_text())["input_ids"]], 2, 64)
    assert record["after"]["perplexity"] == pytest.approx(float(nats(model, text.held_out).mean().exp()), rel=1e-5)
    html = (out / "report.html").read_text()
    assert "Before and after" in html
    assert "/tmp" not in json.dumps(record["settings"]["model"])
    said = capsys.readouterr().out
    assert "zonal generate --model" in said
    # the text goes on from the command line, too
    assert (
        main(
            [
                "generate",
                "--model",
                str(out),
                "--prompt",
                "The old house",
                "--max-new-tokens",
                "3",
                "--temperature",
                "0",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("The old house")
    assert main(words(folder, out)) == 2
    assert "exists. Choose another folder" in capsys.readouterr().err
    weights = out / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert main(["generate", "--model", str(out), "--prompt", "The old house"]) == 2
    assert f"{weights} is not what `zonal convert` wrote" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(FileFormatError, match="it was damaged, copy it again"):
        hf.from_pretrained(out)


def windowed(folder: Path, config: Any, name: str) -> Path:
    """A model whose layers have sliding windows, with the tokeniser of the small Llama."""
    torch.manual_seed(0)
    transformers.AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder / name


LAST_FULL = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3"])
def test_layers_with_a_sliding_window_keep_it(
    kind: str, folder: Path, tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 300, "eos_token_id": 0, "pad_token_id": 0, **SIZES, "num_hidden_layers": 4}
    caps = {"attn_logit_softcapping": None} if kind == "Gemma2" else {}
    name = "Gemma2Config" if kind == "Gemma2" else "Gemma3TextConfig"
    config = getattr(transformers, name)(**sizes, **caps, sliding_window=8, layer_types=LAST_FULL)
    out = tmp_path / "converted"
    line = [*words(folder, out, "--transfer-steps", "4"), "--operator", "local_global(window=4, far='hedgehog')"]
    line[1] = str(windowed(folder, config, kind))
    assert main(line) == 0
    assert "Layers [0, 1] have a sliding window, which bounds their memory, and keep it." in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    names = [operator.name for operator in hf.operators(model)]
    record = json.loads((out / "conversion.json").read_text())
    (chosen,) = record["chosen"]  # half of the two that see all earlier tokens
    assert chosen in (2, 3)
    assert names == ["local_global" if index == chosen else "softmax" for index in range(4)]
    assert record["harms"][:2] == record["transfer"][-1]["losses"]["layers"][:2] == [None, None]
    assert "keeps its window" in (out / "report.html").read_text()


def test_a_model_of_sliding_windows_alone_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.MistralConfig(vocab_size=300, **SIZES, sliding_window=8)
    line = words(folder, tmp_path / "converted")
    line[1] = str(windowed(folder, config, "mistral"))
    assert main(line) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "all 2 layers of MistralForCausalLM have one of 8 tokens" in said
    assert "set sliding_window to null in config.json" in said


def pieces(folder: Path, state: Path, stops: list[int]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Attention transfer of 6 steps, stopped after so many calls of the question whether to stop."""
    model = distil.converted(transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), "ska(power=1)")
    tokens = torch.randint(300, (2_000,), generator=torch.Generator().manual_seed(3)).tolist()
    text = distil.Text.of([tokens], 1, 32)
    told = []
    for stop in [*stops, 100]:
        asked = iter(range(stop + 1))
        told = list(
            distil.learn(
                distil.Transfer(model), distil.Stage(6, 1e-2), text, length=32, seed=1, state=state,
                interrupted=lambda asked=asked, stop=stop: next(asked) >= stop,
            )
        )  # fmt: skip
    return [each.losses for each in told], distil.learned_by(model)[0]


def test_a_wish_to_stop_before_a_stage_stops_there(folder: Path, tmp_path: Path, short: None) -> None:
    """Ctrl-C while something is measured: no model is written that was not trained."""
    settings = pipeline.Settings(
        model=folder / "model", out=tmp_path / "out", to="all", operator="hedgehog", text=str(folder / "text.txt"),
        plan=False, length=32, transfer_steps=2, distil_steps=2, transfer_rate=1e-2, distil_rate=1e-5, windows=2,
        eval_length=32, questions=1, prompt="The old house", seed=0, seconds=None,
    )  # fmt: skip
    for moment in ("Measuring the original", "Layers from the best"):
        said: list[str] = []
        watch = pipeline.Watch(said.append, interrupted=lambda now=moment, said=said: any(now in line for line in said))
        assert not pipeline.run(settings, "zonal convert", watch)
        assert not settings.out.exists()
    assert pipeline.run(settings, "zonal convert", pipeline.Watch([].append))
    record = json.loads((settings.out / "conversion.json").read_text())
    assert [len(record[name]) for name in ("transfer", "distillation")] == [2, 2]


def test_a_conversion_does_not_go_on_with_other_weights(folder: Path, tmp_path: Path, short: None) -> None:
    """A model that was trained further in the same folder, or another of that name."""
    more = ["--transfer-steps", "2", "--distil-steps", "2", "--plan"]
    assert main(words(folder, tmp_path / "out", *more)) == 0
    other = tmp_path / "model"
    shutil.copytree(folder / "model", other)
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(other)
    first, _, *rest = words(folder, tmp_path / "out", *more)
    assert main([first, str(other), *rest]) == 2


@pytest.mark.parametrize(("lengths", "timed"), [((8, 16, 1100), [8, 16]), ((1100,), [8])])
def test_a_table_of_positions_ends(
    folder: Path,
    tmp_path: Path,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    timed: list[int],
) -> None:
    """GPT-2's, which limits the questions and the lengths at which decoding is timed."""
    monkeypatch.setattr("zonal.hf.pipeline._LENGTHS", lengths)
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text())
    config = transformers.GPT2Config(vocab_size=300, n_positions=1024, n_embd=32, n_layer=2, n_head=4, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    more = words(tmp_path, out, "--transfer-steps", "2", "--distil-steps", "2")
    assert main([*more, "--eval-length", "1024"]) == 2
    assert not out.exists()
    shutil.rmtree(tmp_path / "out.work")
    assert main(more) == 0
    record = json.loads((out / "conversion.json").read_text())
    assert [each["length"] for each in record["after"]["decoding"]] == timed


def _learned(task: Any) -> dict[str, Any]:
    """What is learned, by name."""
    return {name: value for name, value in task.model.named_parameters() if value.requires_grad}


def test_a_stopped_stage_goes_on_to_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    whole, learned = pieces(folder, tmp_path / "whole.safetensors", [])
    parts, again = pieces(folder, tmp_path / "parts.safetensors", [2, 1])
    assert len(whole) == 6
    assert parts == whole
    assert all(torch.equal(learned[name], again[name]) for name in learned)
    model = distil.converted(transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), "retention")
    text = distil.Text.of([list(range(300)) * 5], 1, 32)
    with pytest.raises(FileFormatError, match="state of another conversion"):
        list(
            distil.learn(
                distil.Transfer(model), distil.Stage(6, 1e-2), text, length=32, seed=1,
                state=tmp_path / "whole.safetensors",
            )
        )  # fmt: skip


def test_transfer_leaves_the_original_as_it_is_and_learns_operators_alone(folder: Path) -> None:
    original = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = torch.randint(300, (1, 32))
    model = distil.converted(original, "ska(power=1)")
    task = distil.Transfer(model)
    assert all(".operator." in name or ".readout." in name for name in _learned(task))
    found = task.losses(tokens)
    assert len(found["layers"]) == 4
    assert all(0 < error < 10 for error in found["layers"])
    assert all(value.grad is not None for value in _learned(task).values())
    # harm of one layer alone: none for the exact form
    exact = distil.converted(original, "softmax")
    assert distil.harms(exact, tokens) == pytest.approx([0.0] * 4, abs=1e-6)


def test_distillation_starts_at_nothing_to_learn_for_the_exact_form(folder: Path) -> None:
    original = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    model = distil.converted(original, "softmax")
    task = distil.Distillation(model, original)
    assert task.losses(torch.randint(300, (1, 32)))["nats"] == pytest.approx(0.0, abs=1e-6)
    assert all(".self_attn." in name for name in _learned(task))


def test_texts_are_cut_in_two() -> None:
    text = distil.Text.of([list(range(1_000)), list(range(1_000, 2_000))], 3, 50)
    assert len(text.tokens) == 1_800
    assert text.held_out.shape == (3, 50)
    assert not set(text.held_out.flatten().tolist()) & set(text.tokens.tolist())
    assert torch.equal(text.window(1, 5, 20), text.window(1, 5, 20))
    assert not torch.equal(text.window(1, 5, 20), text.window(1, 6, 20))
    with pytest.raises(ArgumentError, match="texts with at least 3,000 tokens are required"):
        distil.Text.of([list(range(500))], 3, 100)
    with pytest.raises(ArgumentError, match="the rest must be longer than 512"):
        distil.Text.of([list(range(500))], 1, 16, 512)


def test_a_rate_rises_and_falls_with_steps_or_time() -> None:
    stage = distil.Stage(100, 1.0, seconds=50.0)
    assert stage.rate_at(0, 0.0) == pytest.approx(0.1)
    assert stage.rate_at(50, 0.0) == pytest.approx(0.55)
    assert stage.rate_at(50, 50.0) == pytest.approx(0.1)
    assert stage.used(10, 25.0) == pytest.approx(0.5)


def test_a_stage_may_begin_on_windows_of_half_the_length(folder: Path, tmp_path: Path) -> None:
    model = distil.converted(transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), "ska(power=1)")
    task, lengths = distil.Transfer(model), []

    def losses(tokens: torch.Tensor) -> dict[str, Any]:
        lengths.append(tokens.shape[1])
        return distil.Transfer.losses(task, tokens)

    task.losses = losses
    text = distil.Text.of([list(range(300)) * 5], 1, 32)
    stage = distil.Stage(4, 1e-2, halved=0.75)
    list(distil.learn(task, stage, text, length=32, seed=1, state=tmp_path / "state.safetensors"))
    assert lengths == [16, 16, 16, 32]


def test_questions_hold_their_answers() -> None:

    def count(text: str) -> int:
        return len(text.split())

    for probe in (needle, pairs):
        found = probe(200, random.Random(0), count)
        assert 180 <= count(found.text) <= 215
        assert found.answer.strip() in found.text
        assert not found.text.endswith(found.answer)
    losses = torch.ones(2, 9)
    assert [(row["from"], row["to"]) for row in by_position(losses, (0, 4, 8, 100))] == [(0, 4), (4, 8), (8, 9)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "a model and --out are required"),
        (["missing", "--out", "x"], "missing does not exist"),
    ],
)
def test_what_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_space_stands_between_prompt_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of tokenizers whose decoder drops the space before a first word, as that of Llama 2."""
    words = [f"▁{word}" for word in ("the", "old", "house", "land", "sea")]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<end>", *words])}, "<end>"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=6, eos_token_id=None, **SIZES)).eval()
    model.generation_config.suppress_tokens = [0]
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert (
        main(["generate", "--model", str(tmp_path), "--prompt", "the old", "--max-new-tokens", "4", "--seed", "1"]) == 0
    )
    printed = capsys.readouterr().out.split("\n")[0]
    assert printed.startswith("the old ")
    assert {*printed.split()} <= {"the", "old", "house", "land", "sea"}


def test_options_alone_say_how_tokens_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beams, which cannot be printed as they come, penalties and lengths in generation_config.json are left out."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, eos_token_id=None, **SIZES)).eval()
    call = ["generate", "--model", str(tmp_path), "--prompt", "w1 w2", "--max-new-tokens", "12", "--temperature", "0"]
    word_tokenizer(f"w{index}" for index in range(40)).save_pretrained(tmp_path)
    tokens = torch.tensor([[1, 2]])
    for _ in range(12):
        tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert tokens.unique().numel() < tokens.numel()  # a penalty of repetitions would change them
    model.save_pretrained(tmp_path)
    settings = {"repetition_penalty": 3.0, "num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    for no_stop in ([], ["--stop", ""]):
        assert main([*call, *no_stop]) == 0
        assert capsys.readouterr().out.split() == [f"w{token}" for token in tokens[0].tolist()]
    assert main([*call[:5], "--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().out == "w1 w2\n"


def test_text_ends_where_the_stop_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of a token, too; one that stands in the prompt alone ends nothing."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, eos_token_id=None, **SIZES)).eval()
    model.save_pretrained(tmp_path)
    word_tokenizer(f"w{index}x" for index in range(40)).save_pretrained(tmp_path)
    call = ["generate", "--model", str(tmp_path), "--prompt", "w1x w2x", "--max-new-tokens", "12", "--temperature", "0"]
    assert main(call) == 0
    whole = capsys.readouterr().out
    third = whole.split()[2]
    for stop in (third[:-1], f"x {third[:-1]}"):
        assert main([*call, "--stop", stop]) == 0
        assert capsys.readouterr().out == f"w1x w2x {third[:-1]}\n"
    assert main([*call, "--stop", "w1x w2"]) == 0
    assert capsys.readouterr().out == whole


def test_samples_of_a_conversion_take_a_prompt_and_the_likeliest_tokens(
    folder: Path, tmp_path: Path, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever generation_config.json says, which is saved again."""
    shutil.copytree(folder / "model", tmp_path / "model")
    shutil.copy(folder / "text.txt", tmp_path)
    path = tmp_path / "model" / "generation_config.json"
    settings = {"do_sample": True, "num_return_sequences": 2, "repetition_penalty": 3.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    more = ["--transfer-steps", "1", "--distil-steps", "1", "--windows", "1"]
    assert main([*words(tmp_path, tmp_path / "out", *more), "--prompt", ""]) == 2
    assert "--prompt is empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out.work")
    assert main(words(tmp_path, tmp_path / "out", *more)) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["repetition_penalty"] == 3.0
    said = [json.loads((tmp_path / "out" / "conversion.json").read_text())["before"]["sample"]]
    assert main(words(folder, tmp_path / "plain", *more)) == 0
    said.append(json.loads((tmp_path / "plain" / "conversion.json").read_text())["before"]["sample"])
    assert said[0] == said[1]
