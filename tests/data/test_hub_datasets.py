import json
import sys

import pytest

from zonal.data import cached_corpus, open_source, tokenizers
from zonal.data.hub import HubDataset
from zonal.errors import ArgumentError, FileFormatError

BYTE = tokenizers.resolve("byte")


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("hub:org/name", HubDataset("org/name", None, "train", None)),
        ("hub:org/name:test", HubDataset("org/name", None, "test", None)),
        ("hub:org/name@subset-1:validation:body", HubDataset("org/name", "subset-1", "validation", "body")),
    ],
)
def test_the_form(spec, parsed):
    assert open_source(spec) == parsed
    assert HubDataset.parse(parsed.spec) == parsed


@pytest.mark.parametrize("spec", ["hub:", "hub:a:", "hub::train", "hub:a:b:c:d", "hub:@x", "hub:a@"])
def test_what_is_not_the_form(spec):
    with pytest.raises(ArgumentError, match="is not understood; required: hub:<name>"):
        open_source(spec)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ArgumentError, match=r"needs the package 'datasets', which is not installed. Install it with"):
        cached_corpus(open_source("hub:org/name"), BYTE)


def test_the_only_column_of_strings_where_no_columns_are_stated():
    class Rows(list):
        features = None

    source = HubDataset("org/name")
    assert source._column(Rows([{"id": 1, "content": "abc"}])) == "content"
    with pytest.raises(ArgumentError, match="which column"):
        source._column(Rows([{"title": "a", "content": "abc"}]))


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    pytest.importorskip("datasets")
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"number": i, "text": f"document {i} é", "other": "x"} for i in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read(spec):
    corpus = cached_corpus(open_source(spec), BYTE)
    return BYTE.decode(corpus.read(0, corpus.count).tolist())


def test_rows_become_documents(dataset):
    assert read(f"hub:{dataset}") == "document 0 é\0document 1 é\0document 2 é"
    assert read(f"hub:{dataset}:train:other") == "x\0x\0x"


def test_changed_rows_are_read_again(dataset):
    read(f"hub:{dataset}")
    (dataset / "train.jsonl").write_text('{"text": "new"}\n')
    assert read(f"hub:{dataset}") == "new"


def test_mistakes_are_named(dataset):
    with pytest.raises(ArgumentError, match="no column 'body'; it has: number, text, other"):
        read(f"hub:{dataset}:train:body")
    with pytest.raises(FileFormatError, match="holds int, text was required"):
        read(f"hub:{dataset}:train:number")
    with pytest.raises(FileFormatError, match=r"cannot be loaded .*Check its name, subset, split"):
        read(f"hub:{dataset}:test")
    with pytest.raises(FileFormatError, match="cannot be loaded"):
        read(f"hub:{dataset / 'nowhere'}")
    (dataset / "train.jsonl").write_text('{"text": "x"}\n{"text": ')
    with pytest.raises(FileFormatError, match="cannot be loaded"):
        read(f"hub:{dataset}")
    (dataset / "train.jsonl").write_text('{"a": "x", "b": "y"}\n')
    with pytest.raises(ArgumentError, match="which column"):
        read(f"hub:{dataset}")
