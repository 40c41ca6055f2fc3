import errno
import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonal.data import open_corpus, tokenizers, write_corpus
from zonal.errors import ArgumentError, FileFormatError, InsufficientSpaceError
from zonal.store import write_checked

BYTE = tokenizers.resolve("byte")
TEXT = "The quick brown fox."


@pytest.fixture
def folder(tmp_path):
    """Twenty tokens in shards of 8, 8 and 4."""
    write_corpus(tmp_path / "corpus", [[TEXT]], BYTE, source="a fox", shard_tokens=8)
    return tmp_path / "corpus"


def edit(path, **changes):
    write_checked(path, json.loads(path.read_text()) | changes)


def test_shards_and_their_descriptions(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.json"] + [
        f"shard-0000{i}.{end}" for i in range(3) for end in ("bin", "json")
    ]
    description = json.loads((folder / "shard-00001.json").read_text())
    assert (description["magic"], description["version"], description["dtype"], description["count"]) == (
        "zonal-tokens",
        1,
        "|u1",
        8,
    )
    corpus = open_corpus(folder)
    assert (corpus.count, corpus.bytes, corpus.documents, corpus.source) == (20, 20, 1, "a fox")


def test_equal_tokens_have_equal_checksums(folder, tmp_path):
    write_corpus(tmp_path / "again", [[TEXT[:3], TEXT[3:]]], BYTE, source="other words", shard_tokens=8)
    assert open_corpus(tmp_path / "again").sha256 == open_corpus(folder).sha256
    write_corpus(tmp_path / "other", [[TEXT.lower()]], BYTE, source="a fox", shard_tokens=8)
    assert open_corpus(tmp_path / "other").sha256 != open_corpus(folder).sha256


@settings(max_examples=25, deadline=None)  # each one writes files and waits for the disk
@given(st.data(), st.integers(1, 30))
def test_any_range_across_shards(tmp_path_factory, data, shard_tokens):
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    write_corpus(folder, [[TEXT]], BYTE, source="", shard_tokens=shard_tokens)
    corpus = open_corpus(folder)
    start = data.draw(st.integers(0, 20))
    stop = data.draw(st.integers(start, 20))
    tokens = corpus.read(start, stop)
    assert tokens.dtype == np.int64
    assert bytes(tokens.tolist()).decode() == TEXT[start:stop]


def test_a_range_outside_is_refused(folder):
    for start, stop in [(-1, 3), (0, 21), (5, 4)]:
        with pytest.raises(ArgumentError, match="0 <= start <= stop <= 20"):
            open_corpus(folder).read(start, stop)


@pytest.mark.parametrize(("name", "dtype"), [("byte", "|u1"), ("gpt2", "<u2")])
def test_the_smallest_type_that_holds_the_vocabulary(tmp_path, name, dtype):
    write_corpus(tmp_path / "corpus", [["text"]], tokenizers.resolve(name), source="")
    assert json.loads((tmp_path / "corpus" / "corpus.json").read_text())["dtype"] == dtype


def truncate(folder):
    data = (folder / "shard-00001.bin").read_bytes()
    (folder / "shard-00001.bin").write_bytes(data[:-1])


def flip(folder):
    data = bytearray((folder / "shard-00002.bin").read_bytes())
    data[1] ^= 4
    (folder / "shard-00002.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"shard-00001\.bin has 7 bytes, 8 were required: it is truncated or foreign"),
        (flip, r"checksum of .*shard-00002\.bin does not match"),
        (lambda f: (f / "shard-00000.bin").unlink(), r"shard-00000\.bin is missing"),
        (lambda f: (f / "shard-00000.json").unlink(), r"shard-00000\.json does not exist"),
        (lambda f: (f / "shard-00000.json").write_text("{"), "is not valid JSON"),
        (
            lambda f: (f / "shard-00000.json").write_text('{"magic": "other"}'),
            "is not a zonal-tokens file; it was written by another program",
        ),
        (lambda f: edit(f / "shard-00000.json", count="8"), r"lacks a valid 'count' \(int required, got '8'\)"),
        (lambda f: edit(f / "shard-00000.json", dtype="<u2"), "belongs to another corpus"),
        (lambda f: edit(f / "corpus.json", version=2), "has version 2, this program reads version 1"),
        (lambda f: edit(f / "corpus.json", magic="x"), "is not a zonal-corpus file"),
        (lambda f: edit(f / "corpus.json", shards=[]), "0 shards"),
        (lambda f: edit(f / "corpus.json", dtype="<f4"), "names dtype '<f4'"),
        (
            lambda f: edit(f / "corpus.json", shards=["../../shard-00000.bin"]),
            "a .bin file in the same folder was required",
        ),
        (
            lambda f: edit(f / "corpus.json", shards=["shard-00000.bin", "shard-00001.bin"]),
            "has 16 tokens, its index says 20",
        ),
        (lambda f: edit(f / "corpus.json", tokenizer_sha256="0"), r"made with another tokenizer \(byte\) than byte"),
        (lambda f: (f / "corpus.json").unlink(), r"corpus\.json does not exist"),
    ],
)
def test_damage_is_found(folder, damage, words):
    open_corpus(folder)
    damage(folder)
    with pytest.raises(FileFormatError, match=words) as caught:
        open_corpus(folder)
    assert "\n" not in str(caught.value)


def test_a_token_outside_the_vocabulary_is_found(tmp_path, monkeypatch):
    gpt2 = tokenizers.resolve("gpt2")
    monkeypatch.setattr(type(gpt2), "encode", lambda self, text: np.array([50256, 7]))
    write_corpus(tmp_path / "corpus", [["x"]], gpt2, source="")
    open_corpus(tmp_path / "corpus")
    bad = np.array([50257, 7], dtype="<u2").tobytes()
    (tmp_path / "corpus" / "shard-00000.bin").write_bytes(bad)
    edit(tmp_path / "corpus" / "shard-00000.json", sha256=hashlib.sha256(bad).hexdigest())
    with pytest.raises(FileFormatError, match="has the token 50257, the vocabulary ends at 50256"):
        open_corpus(tmp_path / "corpus")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InsufficientSpaceError, match="no space left"):
        write_corpus(tmp_path / "corpus", [[TEXT]], BYTE, source="")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_text_leaves_nothing(tmp_path):
    def documents():
        yield ["fine"]
        raise FileFormatError("not fine")

    with pytest.raises(FileFormatError, match="not fine"):
        write_corpus(tmp_path / "corpus", documents(), BYTE, source="", shard_tokens=2)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_corpus_of_another_process_stays(folder):
    before = (folder / "corpus.json").stat().st_mtime_ns
    write_corpus(folder, [[TEXT]], BYTE, source="late", shard_tokens=8)
    assert (folder / "corpus.json").stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_bad_places_to_write(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ArgumentError, match="exists and is not a corpus"):
        write_corpus(tmp_path / "taken", [[TEXT]], BYTE, source="")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match=r"cannot write in .*ZONAL_CACHE"):
        write_corpus(tmp_path / "file" / "corpus", [[TEXT]], BYTE, source="")
    with pytest.raises(ArgumentError, match="shard_tokens must be at least 1"):
        write_corpus(tmp_path / "corpus", [[TEXT]], BYTE, source="", shard_tokens=0)
    with pytest.raises(FileFormatError, match="nothing at all has no text"):
        write_corpus(tmp_path / "corpus", [[], [""]], BYTE, source="nothing at all")
