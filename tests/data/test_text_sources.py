import os
import subprocess
import sys

import pytest

from zonal.data import cached_corpus, open_source, pretokenise, tokenizers
from zonal.errors import ArgumentError, FileFormatError

BYTE = tokenizers.resolve("byte")


def text_of(source, max_bytes=None):
    corpus = cached_corpus(open_source(source), BYTE, max_bytes=max_bytes)
    return BYTE.decode(corpus.read(0, corpus.count).tolist())


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    # made in an order that is neither that of names nor its reverse
    for name, text in [
        ("b.txt", "second"),
        ("a/z.txt", "first"),
        ("c.md", "last"),
        ("b/a.txt", "third"),
        (".hidden", "no"),
        (".git/x", "no"),
        ("empty.txt", ""),
    ]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_folder_is_read_in_the_order_of_paths_with_separators_between(folder):
    # '/' sorts after '.', so b.txt comes before b/a.txt; the empty file gives neither text nor separator
    assert text_of(folder) == "first\0second\0third\0last"


def test_order_does_not_depend_on_the_file_system(folder, monkeypatch):
    listed = os.walk

    def reversed_walk(top, **options):
        for place, folders, files in listed(top, **options):
            yield place, folders, files[::-1]

    monkeypatch.setattr(os, "walk", lambda top, onerror=None: reversed_walk(top, onerror=onerror))
    assert text_of(folder) == "first\0second\0third\0last"


def test_gpt2_separator_between_files(folder):
    gpt2 = tokenizers.resolve("gpt2")
    corpus = cached_corpus(open_source(folder), gpt2)
    tokens = corpus.read(0, corpus.count).tolist()
    assert tokens.count(gpt2.separator) == 3
    assert gpt2.decode(tokens) == "<|endoftext|>".join(["first", "second", "third", "last"])
    assert corpus.documents == 4
    assert corpus.bytes == len("firstsecondthirdlast") + 3


def test_pattern(folder):
    assert text_of(f"{folder}/**/*.txt") == "first\0second\0third"
    with pytest.raises(FileFormatError, match="no file matches the pattern"):
        open_source(f"{folder}/*.rst")


def test_the_name_of_the_working_folder_is_no_pattern(tmp_path, monkeypatch):
    for name in ("x[1]", "x1", "x*", "xx"):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "b.txt").write_text(f"of {name}")
        (tmp_path / name / "a.txt").write_text("first")
    for name in ("x[1]", "x*"):
        monkeypatch.chdir(tmp_path / name)
        assert text_of("part/*.txt") == text_of(f"{tmp_path}/{name}/part/b.*") == f"of {name}"
        assert text_of("**/*.txt") == f"first\0of {name}"
        assert text_of(f"../{name}/**/b.txt") == f"of {name}"
    assert text_of(f"{tmp_path}/x?/part/*.txt") == "of x*\0of x1\0of xx"


def test_one_file_has_no_separator_and_keeps_line_ends(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes("\ufeffä\r\nb\n".encode())
    assert text_of(path) == "ä\r\nb\n"


def test_a_character_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("zonal.data.corpora._BLOCK", 3)
    path = tmp_path / "one.txt"
    path.write_text("aé中文 xé\n\n😀 b", encoding="utf-8")
    assert text_of(path) == "aé中文 xé\n\n😀 b"


def test_max_bytes_cuts_between_characters(tmp_path, folder):
    path = tmp_path / "one.txt"
    path.write_text("ééé", encoding="utf-8")
    assert text_of(path, max_bytes=5) == "éé"
    assert text_of(path) == "ééé"
    assert text_of(folder, max_bytes=8) == "first\0sec"
    with pytest.raises(ArgumentError, match="max_bytes must be at least 1"):
        text_of(path, max_bytes=0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"abc\0def", r"is binary \(byte 0 at offset 3\), UTF-8 text was required"),
        (b"abc \xff def", r"is not UTF-8 text \(invalid start byte at offset 4\)"),
        ("text".encode("utf-16"), "is UTF-16 or binary"),
        ("é".encode()[:1], "ends in the middle of a UTF-8 character"),
    ],
)
def test_files_that_are_not_text(tmp_path, cache, data, words):
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match=words) as caught:
        text_of(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((cache / "corpora").iterdir())


def test_offset_of_a_bad_byte_in_a_later_block(tmp_path, monkeypatch):
    monkeypatch.setattr("zonal.data.corpora._BLOCK", 4)
    path = tmp_path / "data.txt"
    path.write_bytes("abcé".encode() + b"z\xffz")
    with pytest.raises(FileFormatError, match="at offset 6"):
        text_of(path)


def test_a_binary_file_in_a_folder_is_named(folder):
    (folder / "a" / "picture.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(FileFormatError, match=r"picture\.png is binary"):
        text_of(folder)


def test_missing_empty_and_misunderstood_sources(tmp_path):
    with pytest.raises(FileFormatError, match=r"nowhere\.txt does not exist. Required: a UTF-8 text file, a folder"):
        open_source(tmp_path / "nowhere.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileFormatError, match="has no files"):
        open_source(tmp_path / "empty")
    (tmp_path / "empty" / "nothing.txt").touch()
    with pytest.raises(FileFormatError, match="is empty; at least one character"):
        open_source(tmp_path / "empty")
    with pytest.raises(FileFormatError, match=r"nothing\.txt is empty"):
        open_source(tmp_path / "empty" / "nothing.txt")
    with pytest.raises(ArgumentError, match="the name is empty"):
        open_source("")
    (tmp_path / "mark.txt").write_text("\ufeff", encoding="utf-8")
    with pytest.raises(FileFormatError, match="has no text"):
        text_of(tmp_path / "mark.txt")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_unreadable_file(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(FileFormatError, match=r"secret\.txt cannot be read"):
        text_of(path)


def test_the_cache_is_keyed_by_contents_and_tokenizer(tmp_path, cache, monkeypatch):
    path, copy = tmp_path / "one.txt", tmp_path / "two.txt"
    path.write_text("some text")
    copy.write_text("some text")
    first = cached_corpus(open_source(path), BYTE)
    # the same contents are not tokenised again, under whatever name
    monkeypatch.setattr(type(BYTE), "encode", lambda self, text: pytest.fail("tokenised again"))
    assert cached_corpus(open_source(copy), BYTE).folder == first.folder
    monkeypatch.undo()
    monkeypatch.setenv("ZONAL_CACHE", str(cache))
    folders = {
        first.folder,
        cached_corpus(open_source(path), tokenizers.resolve("gpt2")).folder,
        cached_corpus(open_source(path), BYTE, max_bytes=3).folder,
    }
    path.write_text("other text")
    folders.add(cached_corpus(open_source(path), BYTE).folder)
    assert len(folders) == 4
    assert sorted((cache / "corpora").iterdir()) == sorted(folders)


def test_processes_that_prepare_the_same_text_do_not_meet(tmp_path, cache):
    path = tmp_path / "one.txt"
    path.write_text("some words and more\n" * 5_000)
    program = (
        "import sys; from zonal.data import cached_corpus, open_source, tokenizers;"
        "c = cached_corpus(open_source(sys.argv[1]), tokenizers.resolve('gpt2')); print(c.count, c.sha256)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(list((cache / "corpora").iterdir())) == 1


def test_pretokenise_keeps_a_corpus_where_asked(folder, tmp_path):
    kept = pretokenise(folder, tokenizers.resolve("gpt2"), tmp_path / "kept")
    assert kept.tokenizer == "gpt2"
    assert kept.documents == 4
    with pytest.raises(ArgumentError, match="exists already"):
        pretokenise(folder, BYTE, tmp_path / "kept")
