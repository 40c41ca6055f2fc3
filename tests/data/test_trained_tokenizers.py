"""Tokenisers that are learned from a text and read from a file."""

import json

import numpy as np
import pytest
import tokenizers as tokenizers_library

from zonal import tasks
from zonal.cli import generate, main
from zonal.data import cached_corpus, open_source, tokenizers
from zonal.errors import ArgumentError, FileFormatError

TEXT = "the whale and the sea, the ship and the whale; naïve 鯨 \x01 end\n" * 40


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    tokenizers.train([TEXT], 300, path)
    return path


@pytest.mark.parametrize("text", [TEXT, "", " ", "\n\n  tabs\t", "unseen: Ω ∑ 𝄞 qqq", "a <|endoftext|> b", "\x00\x7f"])
def test_no_text_is_lost(file, text):
    tokenizer = tokenizers.resolve(str(file))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens.tolist()) == text
    assert int(tokenizer.token_bytes[tokens].sum()) == len(text.encode())
    assert tokenizer.separator not in tokens


def test_tokens_are_learned_from_the_text(file):
    tokenizer = tokenizers.resolve(str(file))
    assert 257 < tokenizer.vocab_size <= 300
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode()) / 3
    assert tokenizer.decode(tokenizer.encode(" whale").tolist()[:1]) == " whale"
    assert tokenizer.token_bytes[tokenizer.separator] == 1


def test_the_same_texts_give_the_same_file(file, tmp_path):
    again = tokenizers.train([TEXT], 300, tmp_path / "other.json")
    assert again.fingerprint == tokenizers.resolve(str(file)).fingerprint
    assert again.fingerprint != tokenizers.train([TEXT], 280, tmp_path / "smaller.json").fingerprint
    assert again.fingerprint != tokenizers.resolve("gpt2").fingerprint


def test_a_corpus_remembers_its_tokenizer(file, tmp_path, monkeypatch):
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT * 4)
    task = tasks.resolve("text", tasks.TaskSettings(data=str(tmp_path / "text.txt"), tokenizer=str(file), length=16))
    assert task.vocab_size == tokenizers.resolve(str(file)).vocab_size
    assert task.describe().startswith(f"{task.vocab_size} token language modelling")
    again = tasks.from_config(json.loads(json.dumps(task.config())))
    assert np.array_equal(again.train_batch(3, 2, 0).tokens, task.train_batch(3, 2, 0).tokens)
    # another tokeniser in the same place is another corpus, and a run on the first is not resumed with it
    copy = tmp_path / "copy.json"
    copy.write_bytes(file.read_bytes())
    config = {**task.config(), "tokenizer": str(copy)}
    assert tasks.from_config(config).vocab_size == task.vocab_size
    copy.unlink()
    tokenizers.train([TEXT], 270, copy)
    with pytest.raises(FileFormatError, match="has changed"):
        tasks.from_config(config)
    opened = cached_corpus(open_source(tmp_path / "text.txt"), tokenizers.resolve(str(file)))
    assert opened.tokenizer == str(file)


def test_a_model_reads_and_writes_by_the_tokenizer_that_it_was_trained_with(file, tmp_path, monkeypatch):
    """In ``zonal generate`` and ``zonal explain``; a hidden token of masked-text has a sign."""
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT * 4)
    copy = tmp_path / "copy.json"
    copy.write_bytes(file.read_bytes())
    task = tasks.MaskedText(tmp_path / "text.txt", str(copy), 16)
    codec = generate.codec(task.config(), task.vocab_size)
    words = codec.encode("the whale")
    assert codec.decode([*words, task.vocab_size - 1, *words]) == "the whale▢the whale"
    copy.unlink()
    values = json.loads(file.read_text())
    merges = values["model"]["merges"]
    values["model"]["merges"] = [*merges[1:], merges[0]]
    copy.write_text(json.dumps(values))
    with pytest.raises(FileFormatError, match=r"generate: the tokenizer .*copy\.json has changed since"):
        generate.codec(task.config(), task.vocab_size)


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(post_processor=None),
        lambda values: values.update(post_processor=dict(values["pre_tokenizer"], trim_offsets=False)),
        lambda values: values["model"].update(dropout=0.0, end_of_word_suffix=""),
    ],
)
def test_tokens_are_those_of_the_library(file, tmp_path, change):
    (tmp_path / "other.json").write_text(damaged(file, change))
    found = tokenizers.resolve(str(tmp_path / "other.json")).encode(TEXT).tolist()
    assert found == tokenizers_library.Tokenizer.from_file(str(tmp_path / "other.json")).encode(TEXT).ids


def damaged(file, change):
    values = json.loads(file.read_text())
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(normalizer={"type": "Lowercase"}), "without a normaliser"),
        (lambda values: values["pre_tokenizer"].update(add_prefix_space=True), "a space before the text"),
        (
            lambda values: values.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
            "byte-level BPE",
        ),
        (lambda values: values["pre_tokenizer"].update(use_regex=False), "with use_regex"),
        (lambda values: values["model"].update(ignore_merges=True), "without ignore_merges"),
        (lambda values: values["model"].update(dropout=0.1), "dropout"),
        (lambda values: values["model"].update(end_of_word_suffix="</w>"), "suffixes of tokens"),
        (lambda values: values.update(truncation={"max_length": 3}), "truncation"),
        (lambda values: values.update(padding={"strategy": {"Fixed": 8}}), "padding"),
        (lambda values: values.update(post_processor=TEMPLATE), "a post_processor that adds tokens"),
        (lambda values: values.pop("model"), "'model' is missing"),
        (lambda values: values["model"]["vocab"].pop("Ġwhale"), "byte-level BPE"),
    ],
)
def test_other_tokenizers_are_refused(file, tmp_path, change, message):
    (tmp_path / "other.json").write_text(damaged(file, change))
    with pytest.raises(FileFormatError, match=message):
        tokenizers.resolve(str(tmp_path / "other.json"))


def test_a_file_without_the_separator_is_refused(file, tmp_path):
    (tmp_path / "other.json").write_text(file.read_text().replace("<|endoftext|>", "<s>"))
    with pytest.raises(FileFormatError, match=r"the token <\|endoftext\|>"):
        tokenizers.resolve(str(tmp_path / "other.json"))


def test_a_file_of_another_ending_is_told_what_is_missing(tmp_path):
    path = tmp_path / "bpe.txt"
    path.write_text("{}")
    with pytest.raises(ArgumentError, match=r"must end with \.json, received .*bpe\.txt"):
        tokenizers.resolve(str(path))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileFormatError, match=r"none\.json does not exist. Required: byte, gpt2 or"):
        tokenizers.resolve(str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("not JSON")
    with pytest.raises(FileFormatError, match=r"text\.json"):
        tokenizers.resolve(str(tmp_path / "text.json"))


@pytest.mark.parametrize(
    ("size", "name", "message"), [(256, "a.json", "at least 257.*got 256"), (300, "a.bin", "new file")]
)
def test_what_cannot_be_learned_is_refused(tmp_path, size, name, message):
    with pytest.raises(ArgumentError, match=message):
        tokenizers.train([TEXT], size, tmp_path / name)


def test_the_command_leaves_out_what_is_held_out(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("abcabcabc " * 900 + "xyzxyzxyz " * 100)
    out = tmp_path / "bpe.json"
    assert main(["tokenizer", "--data", str(tmp_path / "text.txt"), "--size", "280", "--out", str(out)]) == 0
    assert "learned from 9,000 bytes" in capsys.readouterr().out
    tokenizer = tokenizers.resolve(str(out))
    assert len(tokenizer.encode(" abcabcabc")) == 1
    assert len(tokenizer.encode(" xyzxyzxyz")) == 10
    assert main(["tokenizer", "--data", str(tmp_path / "text.txt"), "--out", str(out)]) == 2
    assert "a new file" in capsys.readouterr().err
    assert main(["tokenizer", "--validation-fraction", "1", "--out", str(out.with_name("none.json"))]) == 2
    assert not out.with_name("none.json").exists()
    assert main(["tokenizer"]) == 2
    assert "--out is required" in capsys.readouterr().err


def test_many_short_documents_do_not_move_what_is_held_out(tmp_path, monkeypatch, capsys):
    """Each document's separator counts as one byte, here as in the task."""
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(1000):
        (folder / f"a{index:03}.txt").write_text("abc")
    (folder / "z.txt").write_text("b" * 5000)
    command = ["tokenizer", "--data", str(folder), "--size", "280", "--out", str(tmp_path / "bpe.json")]
    assert main([*command, "--validation-fraction", "0.4"]) == 0
    held = tasks.Text(folder, "byte", 16, validation_fraction=0.4)
    assert f"learned from {held.split:,} bytes" in capsys.readouterr().out
    assert held.split == 8999 - int(8999 * 0.4)


def test_the_command_tells_of_the_first_text(tmp_path, capsys):
    """An empty first file gave 0.00 bytes a token, and a large one was read into memory whole."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    (tmp_path / "texts" / "b.txt").write_text("abcabcabc " * 900)
    command = ["tokenizer", "--data", str(tmp_path / "texts"), "--size", "280", "--out", str(tmp_path / "bpe.json")]
    assert main(command) == 0
    assert "; 10.00 bytes a token" in capsys.readouterr().out
