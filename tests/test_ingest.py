"""Folders of texts in one memory: the same bits in every order, nothing left of what is subtracted, nothing lost."""

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
import time
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import ingest as benchmark
from zonal import ingest, store
from zonal.cli import ingest as command
from zonal.cli import main
from zonal.data.corpora import novel
from zonal.errors import ArgumentError, FileFormatError
from zonal.ingest import archive, asking, folder, sums, text, update

TEXTS = {
    "mill.txt": "The mill stands at the end of the lane. It was built in 1804.",
    "road.txt": "The road over the hill is closed in winter.",
    "inns/harker.txt": "\ufeffThe inn has nine rooms.\r\n\r\nThe landlady is Mrs Harker. Die Küche schließt um zehn.",
    "inns/東京.txt": "宿は東京にあります。部屋は九つです。",
}
SMALL = {"heads": 4, "size": 20}


def written(root: Path, texts: dict[str, str]) -> Path:
    for name, content in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    return root


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return written(tmp_path / "notes", TEXTS)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (folder, archive):
        monkeypatch.setattr(module, "BATCH", 8)


@pytest.fixture
def chapters(tmp_path: Path) -> Path:
    """24 documents of 60 words, three batches."""
    parts = novel()[10_000:30_000].split()
    return written(tmp_path / "novel", {f"{n:02}.txt": " ".join(parts[60 * n : 60 * n + 60]) for n in range(24)})


def same(first: ingest.Archive, second: ingest.Archive) -> bool:
    """Whether two archives hold the same, to the bit."""
    one, other = first.documents(), second.documents()
    return (
        first.memory.count == second.memory.count
        and first.memory.state.numpy().tobytes() == second.memory.state.numpy().tobytes()
        and [(name[1], read.data) for name, read in one.items()]
        == [(name[1], read.data) for name, read in other.items()]
        and all(np.array_equal(one[a].keys, other[b].keys) for a, b in zip(one, other, strict=True))
    )


@pytest.mark.parametrize(
    ("question", "document", "words"),
    [
        ("When was the mill built?", "mill.txt", "built in 1804"),
        ("Who is the LANDLADY?", "inns/harker.txt", "Mrs Harker"),
        ("Who's the landlady?", "inns/harker.txt", "Mrs Harker"),
        ("Wasn’t the lane the MILL’S?", "mill.txt", "built in 1804"),
        ("Wann schließt die KÜCHE?", "inns/harker.txt", "um zehn"),
        ("東京の宿", "inns/東京.txt", "宿は東京に"),
    ],
)
def test_an_answer_is_a_span_of_a_document(notes, tmp_path, question, document, words):
    archive = ingest.ingest(notes, tmp_path / "memory", **SMALL).archive
    (found,) = ingest.ask(archive, question)
    assert (found.folder, found.document) == (str(notes), document)
    assert words in found.text
    assert (notes / document).read_bytes().decode()[found.start : found.end] == found.text


def test_what_is_not_there_is_refused(notes, tmp_path):
    archive = ingest.ingest(notes, tmp_path / "memory", **SMALL).archive
    assert ingest.ask(archive, "Where did Napoleon die?") == []
    assert ingest.ask(archive, "Did Napoleon own the mill at Austerlitz?") == []  # one word of three is there
    (found,) = ingest.ask(archive, "Did Napoleon own the mill at Austerlitz?", least=0.1)
    assert found.missing == ("napoleon", "own", "austerlitz")
    assert 0.1 < found.fit < 0.5
    with pytest.raises(ArgumentError, match="the question must have words"):
        ingest.ask(archive, "?!")
    with pytest.raises(ArgumentError, match=r"an Archive is required, received str. .*Archive\.open"):
        ingest.ask(str(tmp_path / "memory"), "mill")  # type: ignore[arg-type]
    for wrong in ({"least": 0}, {"least": "0.6"}, {"top": "3"}, {"candidates": 2.5}):
        with pytest.raises(ArgumentError, match="least must be above 0"):
            ingest.ask(archive, "mill", **wrong)
    assert ingest.ask(archive, "mill", top=np.int64(3), least=np.float32(0.6)) == ingest.ask(archive, "mill", top=3)
    assert len(ingest.ask(archive, "the hill, the mill", least=0.1, top=5)) == 2


def test_words_weigh_by_the_spans_that_have_them(chapters, tmp_path, monkeypatch):
    """Not by those with their buckets, which words share that no span has."""
    archive = ingest.ingest(chapters, tmp_path / "memory", heads=1, size=20).archive
    spans, buckets = asking.Spans(list(archive.documents().values())), sums.KEY_DIM
    having = sum("the" in text.words(spans.text(number)) for number in range(len(spans)))
    assert having > len(spans) / 3
    shares = text.bucket("the", buckets)
    absent = next(word for word in (f"qq{n}" for n in range(10_000)) if text.bucket(word, buckets) == shares)
    weights = asking.weighed(spans, buckets, ["the", absent, "zebulon"])
    assert weights["the"] == math.log1p(len(spans) / (having + 0.5))
    assert weights[absent] == weights["zebulon"] == math.log1p(len(spans) / 1.5)
    monkeypatch.setattr(asking, "READ", 20)
    some = asking.weighed(spans, buckets, ["the", absent])
    assert some[absent] == weights[absent]
    assert 0 < abs(some["the"] - weights["the"]) < 0.3


def test_half_of_the_words_is_no_answer(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("The keeper of the lighthouse traded salt for cloth.")
    archive = ingest.ingest(tmp_path / "texts", tmp_path / "memory", **SMALL).archive
    assert ingest.ask(archive, "salt, cloth, pepper")[0].missing == ("pepper",)
    assert ingest.ask(archive, "salt, cloth, pepper, silk") == []
    assert len(ingest.ask(archive, "salt, cloth, pepper, silk", least=0.4)) == 1


def test_sums_are_those_of_the_memory_and_count_its_spans(chapters):
    reads = [text.read("", file.name, file.read_bytes(), 20, 4 * sums.KEY_DIM) for file in sorted(chapters.iterdir())]
    memory = sums.of(reads[:16], 4)
    keys = torch.zeros(memory.count, 4 * sums.KEY_DIM)
    for row, part in enumerate(np.split(np.concatenate([r.keys for r in reads[:16]]), np.cumsum(
        np.concatenate([r.sizes for r in reads[:16]]))[:-1])):  # fmt: skip
        keys[row, part] = 1
    values = torch.nn.functional.pad(sums.signs(*sums.identities(reads[:16])), (0, 1), value=1.0)
    absorbed = sums.empty(4).absorb(
        keys.view(1, -1, 4, sums.KEY_DIM).transpose(1, 2), values.expand(1, 4, *values.shape).contiguous()
    )
    assert torch.equal(memory.state, absorbed.state)
    assert memory.count == absorbed.count == len(values)
    counted = sums.rows(memory, ["whale", "the"])[:, -1]
    places = [text.bucket(word, 4 * sums.KEY_DIM) for word in ("whale", "the")]
    assert counted.tolist() == [float(keys[:, place].sum()) for place in places]


def test_codes_are_the_same_everywhere():
    found = sums.signs(np.array([1, 2**64 - 1], dtype=np.uint64), np.array([0, 7], dtype=np.uint64))
    assert found.shape == (2, sums.CODE)
    assert set(found.unique().tolist()) == {-1, 1}
    packed = np.packbits(found.numpy() > 0, axis=1)[:, :6].tolist()
    assert packed == [[19, 31, 198, 143, 149, 145], [201, 238, 205, 120, 35, 160]]
    assert text.bucket("whale", 16384) == 7756


def test_every_order_gives_the_same_bits(chapters, tmp_path):
    whole = ingest.ingest(chapters, tmp_path / "whole", **SMALL).archive
    reads = list(whole.documents().values())
    other = ingest.Archive(tmp_path, 4, 20, sums.empty(4))
    for start in np.random.default_rng(0).permutation(8):
        other.add(reads[start::8][::-1])
    other.shards = [*other.shards[4:], *other.shards[:4]]
    assert same(whole, other)
    other.remove(read.name for read in reads)
    assert not other.memory.state.any()
    assert other.memory.count == 0


def test_it_is_what_was_written(chapters, tmp_path):
    made = ingest.ingest(chapters, tmp_path / "memory", **SMALL)
    assert same(made.archive, ingest.Archive.open(tmp_path / "memory"))
    listed = json.loads((tmp_path / "memory" / "archive.json").read_text())
    documents = [each for shard in listed["shards"] for each in shard["documents"]]
    assert len(documents) == 24
    assert sum(each["spans"] for each in documents) == listed["spans"] == made.archive.count


def test_changes_leave_what_a_new_archive_has(chapters, tmp_path):
    out = tmp_path / "memory"
    ingest.ingest(chapters, out, **SMALL)
    secret = "the secret name of the captain is Zebulon"
    (chapters / "07.txt").write_text(secret)
    (chapters / "20.txt").unlink()
    (chapters / "new.txt").write_text("a new document about Zanzibar")
    (chapters / "10.txt").write_bytes(b"\0")
    made = ingest.ingest(chapters, out, **SMALL)
    assert made[1:5] == (2, 1, 21, 2)
    assert [each.path for each in made.skipped] == ["10.txt"]
    assert same(made.archive, ingest.ingest(chapters, tmp_path / "other", **SMALL).archive)
    assert ingest.ask(made.archive, "captain Zebulon")[0].text == secret
    (chapters / "07.txt").unlink()
    again = ingest.ingest(chapters, out, **SMALL)
    assert again[1:5] == (0, 0, 22, 1)
    assert ingest.ask(again.archive, "Zebulon") == []
    for file in out.iterdir():  # subtracted from the memory, and gone from the disk
        assert b"Zebulon" not in file.read_bytes()
    assert ingest.ingest(chapters, out, **SMALL)[1:5] == (0, 0, 22, 0)


def test_two_folders_and_two_archives(notes, chapters, tmp_path):
    ingest.ingest(notes, tmp_path / "both", **SMALL)
    both = ingest.ingest(chapters, tmp_path / "both", **SMALL).archive
    ingest.ingest(notes, tmp_path / "a", **SMALL)
    ingest.ingest(chapters, tmp_path / "b", **SMALL)
    merged = ingest.merge([tmp_path / "b", tmp_path / "a"], tmp_path / "c").archive
    assert same(both, merged)
    assert same(merged, ingest.merge([tmp_path / "c", tmp_path / "a"], tmp_path / "d").archive)
    (notes / "mill.txt").write_text("The mill burned down.")
    ingest.ingest(notes, tmp_path / "a", **SMALL)
    with pytest.raises(ArgumentError, match=r"mill.txt is not the same in .*a and in another"):
        ingest.merge([tmp_path / "c", tmp_path / "a"], tmp_path / "e")
    ingest.ingest(notes, tmp_path / "large", heads=8, size=20)
    with pytest.raises(ArgumentError, match="8 heads and spans of 20 words"):
        ingest.merge([tmp_path / "c", tmp_path / "large"], tmp_path / "e")
    with pytest.raises(ArgumentError, match="holds an archive already"):
        ingest.merge([tmp_path / "c"], tmp_path / "d")
    # the merged archive follows its folders
    assert ingest.ingest(notes, tmp_path / "c", **SMALL)[1:5] == (1, 1, 3, 0)


def test_what_is_not_read_is_named(notes, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LARGEST", 1 << 20)
    outside = written(tmp_path / "outside", {"secret.txt": "the secret is out"})
    (notes / "link.txt").symlink_to(outside / "secret.txt")
    (notes / "folder").symlink_to(outside, target_is_directory=True)
    (notes / "photo.png").write_bytes(b"\x89PNG\0\xff")
    (notes / "latin.txt").write_bytes("café".encode("latin-1"))
    (notes / "large.txt").write_bytes(b"x" * ((1 << 20) + 1))
    os.mkfifo(notes / "pipe")
    (notes / os.fsdecode(b"\xff.txt")).write_text("named in bytes")
    written(notes, {".git/config": "hidden", ".hidden": "hidden", "empty.txt": ""})
    made = ingest.ingest(notes, notes / "memory", **SMALL)
    assert {each.path: each.reason for each in made.skipped} == {
        "link.txt": "it is a link, and links are not followed",
        "folder": "it is a link, and links are not followed",
        "photo.png": "it is binary",
        "latin.txt": "it is not UTF-8 (byte 3)",
        "large.txt": "it has more than 1 MiB",
        "pipe": "it is no regular file",
        "\\udcff.txt": "its name is not UTF-8",
    }
    assert {name for _, name in made.archive.documents()} == {*TEXTS, "empty.txt"}
    assert ingest.ask(made.archive, "secret") == []
    # its own archive, in the folder, is not read the next time
    assert ingest.ingest(notes, notes / "memory", **SMALL)[1:5] == (0, 0, 5, 0)


def test_a_file_that_becomes_a_link_is_not_followed(notes, tmp_path):
    batch = folder.Batch(str(notes), (("mill.txt", None), ("gone.txt", None)), 20, 1024)
    (notes / "mill.txt").unlink()
    (notes / "mill.txt").symlink_to(notes / "road.txt")
    found = folder.read_batch(batch)
    assert all(isinstance(each, folder.Skipped) for each in found)


@pytest.mark.parametrize("others", [23, 24, 30])
def test_a_fit_of_as_much_as_is_required_is_enough(tmp_path, others):
    """Three of five words of equal weight, whose sums are rounded."""
    texts = {f"x{number}.txt": f"filler{number} other{number}." for number in range(others)}
    root = written(tmp_path / "texts", {"a.txt": "falcon granite harbor.", **texts})
    made = ingest.ingest(root, tmp_path / "memory", **SMALL).archive
    (answer,) = ingest.ask(made, "falcon granite harbor ivory jasmine", least=0.6)
    assert answer.document == "a.txt"


class Killed(BaseException):
    """Stands for the end of the process."""


def test_stopped_anywhere_and_continued(chapters, tmp_path, monkeypatch):
    """Each write of a sitting is the last once; the next sitting ends with the same."""
    monkeypatch.setattr(update, "_EVERY", 0.0)
    monkeypatch.setattr(update, "_SHARE", 1.0)
    whole = ingest.ingest(chapters, tmp_path / "whole", **SMALL).archive
    for stop in range(11):
        out, writes = tmp_path / f"memory-{stop}", iter(range(100))

        def replaced(source, target, *, out=out, writes=writes, stop=stop, real=os.replace):
            if next(writes) == stop:
                (out / ".spans-1.safetensors.abc_0123.part").mkdir()
                raise Killed
            real(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replaced)
            with pytest.raises(Killed):
                ingest.ingest(chapters, out, **SMALL)
        made = ingest.ingest(chapters, out, **SMALL)
        assert same(whole, made.archive)
        # a commit is three writes; of a batch that was committed no document is read again
        assert made.unchanged == min(stop // 3 * 8, 24)
        files = {*(shard.file for shard in made.archive.shards), f"memory-{made.archive.number}.safetensors"}
        assert {file.name for file in out.iterdir()} == {"archive.json", *files}


def test_an_archive_without_words_answers_nothing(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for _ in range(2):
        assert ingest.ask(ingest.ingest(folder, tmp_path / "memory").archive, "Where is the key?") == []
        (folder / "empty.txt").write_text("", encoding="utf-8")


def test_one_process_at_a_time_and_only_archives(notes, tmp_path):
    with update.folder_lock(tmp_path / "memory"), pytest.raises(ArgumentError, match="in use by another process"):
        ingest.ingest(notes, tmp_path / "memory")
    with pytest.raises(ArgumentError, match=r"is not empty and holds no archive \(there is"):
        ingest.ingest(notes, notes / "inns")
    with pytest.raises(ArgumentError, match="cannot be both"):
        ingest.ingest(notes, notes)
    with pytest.raises(ArgumentError, match="is not a folder"):
        ingest.ingest(notes / "mill.txt", tmp_path / "memory")
    with pytest.raises(ArgumentError, match="workers must be at least 1, or 'ray'"):
        ingest.ingest(notes, tmp_path / "memory", workers="four")
    ingest.ingest(notes, tmp_path / "memory", **SMALL)
    with pytest.raises(ArgumentError, match=r"a memory of 4 heads and spans of 20 words; 64 and 80 were asked for"):
        ingest.ingest(notes, tmp_path / "memory")


@pytest.mark.parametrize("sizes", [{"heads": "64"}, {"size": 2.5}, {"heads": True}, {"size": 0}, {"heads": 65_537}])
def test_sizes_are_whole_numbers(notes, tmp_path, sizes):
    with pytest.raises(ArgumentError, match=f"ingest: {next(iter(sizes))} must be a whole number"):
        ingest.ingest(notes, tmp_path / "memory", **sizes)


def test_one_path_is_no_list_of_archives(tmp_path):
    for path in (str(tmp_path), tmp_path):
        with pytest.raises(ArgumentError, match="merge: a list of at least one archive is required, received"):
            ingest.merge(path, tmp_path / "other")


def test_damaged_archives_are_refused(notes, tmp_path):
    out = tmp_path / "memory"
    ingest.ingest(notes, out, heads=1, size=20)
    generator = np.random.default_rng(0)
    for file in sorted(out.iterdir()):
        whole = file.read_bytes()
        for place in generator.integers(0, len(whole), 12):
            file.write_bytes(
                whole[:place] + bytes([whole[place] ^ (1 << int(generator.integers(8)))]) + whole[place + 1 :]
            )
            with pytest.raises(FileFormatError, match=file.name):
                ingest.Archive.open(out)
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(FileFormatError, match=file.name):
            ingest.Archive.open(out)
        file.unlink()
        with pytest.raises(FileFormatError):
            ingest.Archive.open(out)
        file.write_bytes(whole)
    assert len(ingest.Archive.open(out).documents()) == 4


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("memory", "file"), "../memory-2.safetensors", "names files that no archive has"),
        (("shards", 0, "file"), "/etc/passwd", "names files that no archive has"),
        (("shards", 0, "documents", 0, "bytes"), 10**9, "is not what was read"),
        (("shards", 0, "documents", 0, "spans"), 0, "more spans than documents"),
        (("shards", 0, "documents", 1, "path"), "inns/harker.txt", "not those of its memory"),
        (("shards",), [], "not those of its memory"),
        (("heads",), 2, "not of an archive of its size"),
        (("heads",), -1, "does not fit"),
        (("skipped",), 3, "does not fit"),
    ],
)
def test_forged_records_are_refused(notes, tmp_path, place, value, message):
    ingest.ingest(notes, tmp_path / "memory", heads=1, size=20)
    file = tmp_path / "memory" / "archive.json"
    record = json.loads(file.read_text())
    del record["checksum"]
    *way, last = place
    inner = record
    for step in way:
        inner = inner[step]
    inner[last] = value
    store.write_json(file, {**record, "checksum": store.checksum({}, record)})
    with pytest.raises(FileFormatError, match=message):
        ingest.Archive.open(tmp_path / "memory")


def test_an_archive_of_other_words_is_refused(notes, tmp_path):
    ingest.ingest(notes, tmp_path / "memory", heads=1, size=20)
    file = tmp_path / "memory" / "archive.json"
    record = {**json.loads(file.read_text()), "schema": 1}
    store.write_checked(file, record)
    with pytest.raises(FileFormatError, match=r"with schema 2, received schema 1\. Read the folder again into a new"):
        ingest.ingest(notes, tmp_path / "memory", heads=1, size=20)


def test_sums_stay_exact(notes, tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "MOST", 3)
    with pytest.raises(ArgumentError, match="at most 3 spans exactly"):
        ingest.ingest(notes, tmp_path / "memory", **SMALL)


@pytest.mark.filterwarnings("error")
def test_whole_numbers_do_not_drift() -> None:
    half = dataclasses.replace(sums.empty(1), count=sums.MOST // 2)
    assert sums.together(half, half).count == sums.MOST


# with vowel signs, accents and joiners, which belong to the word that they follow
WORDS = st.text(alphabet=st.sampled_from("ab1 \n.!?\t\r—\ufeff東。é_काü\u0301İ\u05b7\u200d\ufe0f"), max_size=200)


@given(WORDS, st.integers(1, 9))
def test_spans_hold_all_words_once(content, size):
    found = list(text.spans(content, size))
    parts = [text.words(content[start:end]) for start, end in found]
    assert [word for part in parts for word in part] == text.words(content)
    assert all(1 <= len(part) <= size for part in parts)
    assert all(a[1] <= b[0] for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("काली बिल्ली, ரக்ஷா", ["काली", "बिल्ली", "ரக்ஷா"]),
        ("ที่บ้าน ดี", ["ที่บ้าน", "ดี"]),
        ("كِتَاب שָׁלוֹם", ["كِتَاب", "שָׁלוֹם"]),
        ("ශ්\u200dරී ලංකා می\u200cخواهم", ["ශ්\u200dරී", "ලංකා", "می\u200cخواهم"]),
        ("İstanbul İZMİR ISTANBUL", ["istanbul", "izmir", "istanbul"]),
        ("cafe\u0301 CAFÉ", ["café", "café"]),
        ("ΐ Ϊ\u0301", ["ΐ", "ΐ"]),
        ("1\ufe0f\u20e3 one \u0301two x_\u0301y", ["1", "one", "two", "x", "y"]),
        ("𑄌𑄋𑄴𑄟𑄳𑄦 𞤀𞥄", ["𑄌𑄋𑄴𑄟𑄳𑄦", "𞤢𞥄"]),
        ("It’s “so”, naïve—isn't it?", ["it", "s", "so", "naïve", "isn", "t", "it"]),
    ],
)
def test_marks_belong_to_words(content, words):
    assert [unicodedata.normalize("NFC", word) for word in text.words(content)] == words
    assert len(list(text.spans(content, len(words)))) == 1


def test_a_word_is_not_found_by_its_letters(tmp_path):
    root = written(tmp_path / "hindi", {"cat.txt": "काली बिल्ली कल आई", "art.txt": "कला"})
    made = ingest.ingest(root, tmp_path / "memory", workers=1, **SMALL).archive
    assert [(each.document, each.fit) for each in ingest.ask(made, "कला", top=9)] == [("art.txt", 1.0)]
    assert [each.document for each in ingest.ask(made, "काली", top=9)] == ["cat.txt"]


def test_spans_end_with_sentences():
    content = "One two three. Four five six seven. Eight nine ten eleven twelve thirteen"
    assert [content[start:end] for start, end in text.spans(content, 9)] == [
        "One two three. Four five six seven.",
        "Eight nine ten eleven twelve thirteen",
    ]


def test_commands(notes, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "memory")
    assert main(["ingest", str(notes), "--out", out, "--heads", "4"]) == 0
    said = capsys.readouterr().out
    assert "4 documents read (0 of them had changed), 0 unchanged, 0 removed, 0 files skipped." in said
    assert "holds 4 documents in 4 spans; the memory takes 1.0 MiB." in said
    with monkeypatch.context() as patched:
        patched.setattr(command, "_MANY", 0.5)
        assert main(["ingest", str(notes), "--out", out, "--heads", "4"]) == 0
    assert "is small for so many spans and misses answers. A new archive finds more with --heads 16." in (
        capsys.readouterr().out
    )
    assert main(["ask", out, "When was the mill built?"]) == 0
    said = capsys.readouterr().out
    assert f"{notes}/mill.txt, characters 0 to 61 (fit 1.00)\n{TEXTS['mill.txt']}\n" == said
    assert main(["ask", out, "Where is Napoleon?"]) == 1
    assert capsys.readouterr().out == "not in memory\n"
    assert main(["ask", out, "winter road", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["document"] == "road.txt"
    assert main(["ingest", "--merge", out, "--out", str(tmp_path / "other")]) == 0
    for words, message in (
        (["ingest"], "a folder and --out were required"),
        (["ask", out], "a memory and a question were required"),
        (["ingest", str(notes), "--out", out, "--workers", "many"], "a number from 1 to 1024, or ray"),
        (["ask", str(notes), "why"], "holds no archive (no archive.json). Give the folder that `zonal ingest` wrote"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_the_benchmark_counts_what_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "QUESTIONS", 20)
    options = ["--documents", "100", "--heads", "16", "1", "--workers", "1", "--turns", "1", "--out"]
    assert benchmark.main([*options, str(tmp_path / "ingest.json")]) == 0
    small, enough, speed = json.loads((tmp_path / "ingest.json").read_text())["rows"]
    assert (enough["documents"], enough["heads"], round(enough["memory_mib"])) == (100, 16, 4)
    assert enough["first"] == enough["exact"] == enough["least_0.5"]["right"] == 1
    assert small["first"] < 0.5
    assert small["exact"] == 1
    assert speed["documents_per_second"] > 1


def test_two_workers_and_a_kill_give_the_same_bits(chapters, tmp_path):
    whole = ingest.ingest(chapters, tmp_path / "whole", **SMALL).archive
    assert same(whole, ingest.ingest(chapters, tmp_path / "two", workers=2, **SMALL).archive)
    code = (
        "import sys, time; from zonal.ingest import update; update._EVERY = 0; update._SHARE = 1;"
        "update.ingest(sys.argv[1], sys.argv[2], heads=4, size=20, on_progress=lambda *_: (print(flush=True), "
        "time.sleep(0.05)))"
    )
    words = [sys.executable, "-c", code, str(chapters), str(tmp_path / "killed")]
    for wait in (0.0, 0.03, 0.1):
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait)
            process.kill()
    assert same(whole, ingest.ingest(chapters, tmp_path / "killed", **SMALL).archive)


def test_a_document_without_keys_is_counted(tmp_path: Path) -> None:
    """Its one character is a word, which becomes a space and an accent when it is normalised."""
    root = written(tmp_path / "marks", {"mark.txt": "\ufe70", "mill.txt": TEXTS["mill.txt"]})
    made = ingest.ingest(root, tmp_path / "memory", workers=1, **SMALL).archive
    assert made.memory.count == made.count
    again = archive.Archive.open(tmp_path / "memory")
    assert again.count == made.count
    (root / "mill.txt").unlink()
    left = ingest.ingest(root, tmp_path / "memory", workers=1, **SMALL).archive
    assert left.memory.count == left.count == archive.Archive.open(tmp_path / "memory").count == 1


def test_merge_refuses_the_sizes_of_a_new_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ingest", "a", "b", "--merge", "--heads", "8", "--out", str(tmp_path / "c")]) == 2
    assert "no --heads. Leave it out" in capsys.readouterr().err


def test_a_folder_with_braces_is_read_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = written(tmp_path / "a{b}[c]", {"mill.txt": TEXTS["mill.txt"]})
    shown = io.StringIO()
    monkeypatch.setattr(command, "screen", lambda: Console(file=shown, force_terminal=True, width=400))
    assert main(["ingest", str(root), "--out", str(tmp_path / "memory"), "--heads", "4", "--workers", "1"]) == 0
    assert "a{b}[c]" in shown.getvalue()
