"""Documents in memory: one document says what its text says, forks leave it alone, forgetting, merging, files, and what
is refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_llama import SIZES, word_tokenizer
from tokenizers import processors

from zonal import hf
from zonal.errors import ArgumentError, FileFormatError
from zonal.training.environment import folder_lock

WORDS = [f"w{index}" for index in range(60)]


def tokenizer() -> Any:
    return word_tokenizer(["<end>", *WORDS])


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "ours":
        return hf.ZonalForCausalLM(
            hf.ZonalConfig(vocab_size=61, dim=32, layers="squared_affine, ska(power=1)", heads=4, rotary=True)
        ).eval()
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, eos_token_id=0, **SIZES)).eval()
    hf.convert(made, "squared_affine", layers=None if kind == "converted" else [1], cache="memory")
    return made


def text(count: int, seed: int) -> str:
    drawn = torch.randint(60, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in drawn.tolist())


KINDS = ["ours", "converted", "hybrid"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_document_in_memory_says_what_its_text_says(kind: str) -> None:
    made = model(kind)
    context = hf.ContextMemory(made, tokenizer())
    document, question = text(1_500, 1), text(7, 2)
    read = context.read("first", document)
    assert (read.name, read.tokens) == ("first", 1_500)
    ids = context.tokenizer(f"{document} {question}", return_tensors="pt")["input_ids"]
    wanted = made.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0)[0, ids.shape[1] :]
    options = {"max_new_tokens": 6, "do_sample": False}
    for _ in range(2):  # a question leaves the memory as it was
        assert context.ask(question, **options) == context.tokenizer.decode(wanted, skip_special_tokens=True)
    logits = made(ids).logits[0, -7:-1].log_softmax(-1)
    alone = float(logits.gather(1, ids[0, -6:, None]).sum())
    assert context.score(question) == pytest.approx(alone, abs=2e-3)


@torch.no_grad()
def test_a_document_begins_as_the_tokenizer_begins_a_text() -> None:
    begins = tokenizer()
    begins.bos_token = WORDS[0]
    template = processors.TemplateProcessing(single=f"{WORDS[0]} $A", special_tokens=[(WORDS[0], 1)])
    begins.backend_tokenizer.post_processor = template
    made = model("ours")
    context = hf.ContextMemory(made, begins)
    document, question = text(20, 1), text(3, 2)
    assert context.read("first", document).tokens == 21
    ids = begins(f"{document} {question}", return_tensors="pt")["input_ids"]
    wanted = made.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0)[0, ids.shape[1] :]
    asked = context.ask(question, max_new_tokens=6, do_sample=False)
    assert asked == begins.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_listed_forgotten_and_merged(kind: str) -> None:
    context = hf.ContextMemory(model(kind), tokenizer())
    for number, name in enumerate(("a", "b", "c")):
        context.read(name, text(40 + number, number))
    assert [(each.name, each.tokens) for each in context.contents()] == [("a", 40), ("b", 41), ("c", 42)]
    question = text(5, 9)
    two = context.score(question, ["a", "c"])
    context.forget("b")
    assert [each.name for each in context.contents()] == ["a", "c"]
    assert context.score(question) == two
    assert context.score(question, ["a"]) != two
    assert context.memory().count == 82
    if kind == "converted":  # sums do not grow
        assert len({each.nbytes for each in context.contents()}) == 1
        assert context.memory().nbytes == context.contents()[0].nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    made = model(kind)
    context = hf.ContextMemory(made, tokenizer())
    context.read("a", text(30, 1))
    context.read("b/../c", text(20, 2))  # a name, not a path
    context.save(tmp_path / "kept")
    again = hf.ContextMemory(made, tokenizer())
    again.load(tmp_path / "kept")
    assert again.contents() == context.contents()
    question = text(5, 9)
    assert again.score(question) == context.score(question)
    with pytest.raises(ArgumentError, match="'a' has been read already"):
        again.load(tmp_path / "kept")
    other = model(kind)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(FileFormatError, match="written with other weights"):
        hf.ContextMemory(other, tokenizer()).load(tmp_path / "kept")
    index = tmp_path / "kept" / "documents.json"
    edited = {name: each for name, each in json.loads(index.read_text()).items() if name != "checksum"}
    index.write_text(json.dumps(edited).replace("document-0.safetensors", "../document-0.safetensors"))
    with pytest.raises(FileFormatError, match="names files outside of its folder"):
        hf.ContextMemory(made, tokenizer()).load(tmp_path / "kept")
    damaged = tmp_path / "kept" / "document-1.safetensors"
    index.write_text(index.read_text().replace("../document", "document"))
    damaged.write_bytes(damaged.read_bytes()[:-20])
    fresh = hf.ContextMemory(made, tokenizer())
    with pytest.raises(FileFormatError, match="document-1"):
        fresh.load(tmp_path / "kept")
    assert fresh.contents() == ()


def test_what_is_refused() -> None:
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, **SIZES))
    with pytest.raises(ArgumentError, match="a converted model is required"):
        hf.ContextMemory(plain, tokenizer())
    context = hf.ContextMemory(model("converted"), tokenizer())
    with pytest.raises(ArgumentError, match="at least one document is required"):
        context.ask("w1")
    context.read("a", "w1 w2 w3")
    for call in (lambda: context.read("a", "w4"), lambda: context.read("b", ""), lambda: context.ask(""),
                 lambda: context.ask("w1", ["nobody"]), lambda: context.forget("nobody")):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"has been read|no tokens|has not been read. Known: a"):
            call()
    for call, said in (
        (lambda: context.ask("w1", "a"), r"names must be a list, received 'a'. Pass \['a'\]"),
        (lambda: context.ask("w1", ["a", "a"]), "each document can be named once"),
        (lambda: context.score("w1"), "at least two tokens"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call()
    assert [each.name for each in context.contents()] == ["a"]


@pytest.mark.parametrize("kind", ["ours", "converted"])
def test_an_answer_by_beams_is_that_of_one_text(kind: str) -> None:
    made = model(kind)
    context = hf.ContextMemory(made, tokenizer())
    context.read("a", "w1 w2 w3 w4")
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    text = tokenizer()("w1 w2 w3 w4 w5 w6", return_tensors="pt")["input_ids"]
    whole = made.generate(text, attention_mask=torch.ones_like(text), pad_token_id=0, eos_token_id=0, **options)
    assert context.ask("w5 w6", **options) == tokenizer().decode(whole[0, 6:], skip_special_tokens=True)


@pytest.mark.parametrize("options", [
    {"num_beams": 3}, {"generation_config": transformers.GenerationConfig(num_beams=3, max_new_tokens=4)},
    {"num_return_sequences": 2, "num_beams": 2}, {"eos_token_id": [3, 9]}, {"pad_token_id": 3},
    {"logits_processor": transformers.LogitsProcessorList([transformers.SuppressTokensLogitsProcessor([5, 6, 7])])},
], ids=lambda options: "-".join(options))  # fmt: skip
@torch.no_grad()
def test_options_of_generate_do_what_they_do_for_one_text(options: dict[str, Any]) -> None:
    made = model("ours")
    context = hf.ContextMemory(made, tokenizer())
    context.read("a", "w1 w2 w3 w4")
    text = tokenizer()("w1 w2 w3 w4 w5 w6 w5 w6", return_tensors="pt")["input_ids"]
    options = {"do_sample": False, **options}
    if "generation_config" not in options:
        options["max_new_tokens"] = 4
    settings = {"pad_token_id": 0, "eos_token_id": 0, **options}
    whole = made.generate(text, attention_mask=torch.ones_like(text), **settings)
    assert context.ask("w5 w6 w5 w6", **options) == tokenizer().decode(whole[0, 8:], skip_special_tokens=True)


def test_a_penalty_knows_the_tokens_of_the_question_alone() -> None:
    context, seen = hf.ContextMemory(model("ours"), tokenizer()), []
    context.read("a", "w1 w2 w3 w4")
    context.ask("w5 w6", max_new_tokens=1, logits_processor=[lambda tokens, scores: seen.append(tokens) or scores])
    assert seen[0].tolist() == [[6] * 4 + [6, 7]]


def test_beams_and_ends_of_the_models_config_are_kept() -> None:
    made = model("ours")
    context = hf.ContextMemory(made, tokenizer())
    context.read("a", "w1 w2 w3 w4")
    plain = context.ask("w5 w6", max_new_tokens=4, do_sample=False)
    assert plain is not None
    first = context.tokenizer.convert_tokens_to_ids(plain.split()[0])
    made.generation_config.eos_token_id = [0, first]
    assert context.ask("w5 w6", max_new_tokens=4, do_sample=False) == plain.split()[0]
    made.generation_config.num_beams = 3
    made.generation_config.eos_token_id = None
    beams = context.ask("w5 w6", max_new_tokens=4, do_sample=False)
    made.generation_config.num_beams = 1
    assert beams == context.ask("w5 w6", max_new_tokens=4, do_sample=False, num_beams=3)
    assert context.ask("w5 w6", max_new_tokens=4, do_sample=True, num_return_sequences=2) is not None


def test_a_stopped_save_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a new save are not read under the names of an older one."""
    context = hf.ContextMemory(model("ours"), tokenizer())
    context.read("a", "w1 w2")
    context.save(tmp_path / "kept")
    with monkeypatch.context() as patched:
        patched.setattr(
            "zonal.models.memory.ModelMemory.save", lambda self, path: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            context.save(tmp_path / "kept")
    with pytest.raises(FileFormatError, match=r"documents.json does not exist"):
        context.load(tmp_path / "kept")
    monkeypatch.setattr("zonal.hf.context._WAIT", 0.0)
    with (
        folder_lock(tmp_path / "kept"),
        pytest.raises(ArgumentError, match=r"ContextMemory.save: .* is in use by another"),
    ):
        context.save(tmp_path / "kept")
