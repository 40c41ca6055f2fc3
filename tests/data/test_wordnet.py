"""The shipped trees of WordNet, and the script that makes them, on a few synsets of its format."""

import pytest

from tools import prepare_wordnet
from zonal.data import wordnet
from zonal.errors import ArgumentError, FileFormatError

SYNSETS = """\
  1 This software and database is being provided to you, the LICENSEE, by
00015388 05 n 02 animal 0 beast 0 002 ~ 00000002 n 0000 ~ 00000001 n 0000 | a living organism | with a bar
00000002 05 n 01 dog 0 003 @ 00015388 n 0000 #m 00000010 n 0000 #m 00000011 n 0000 | barks
00000001 05 n 01 cat 0 002 @ 00015388 n 0000 ! 00000002 n 0101 | does not
00000003 05 n 01 Rover 0 002 @i 00000002 n 0000 @ 00000001 n 0000 | one dog
07992450 14 n 01 taxonomic_group 0 000 | groups
00000010 05 n 01 Canis 0 002 @ 00000020 n 0000 #m 00000011 n 0000 | dogs
00000011 05 n 01 Canidae 0 001 @ 07992450 n 0000 | dogs and foxes
00000012 05 n 01 Felidae 0 001 @ 07992450 n 0000 | no shipped member
00000020 05 n 01 genus 0 001 @ 07992450 n 0000 | a kind of group
00021939 06 n 01 artifact 0 000 | made
"""


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "data.noun"
    path.write_text(SYNSETS)
    return prepare_wordnet.compact(prepare_wordnet.synsets(path))


def test_the_script_keeps_trees_and_their_groups(lines):
    # a child of two stands below the first; groups without animals are left out
    assert lines.splitlines() == [
        "0 animal",
        "1 dog 7 5",
        "2 Rover",
        "1 cat",
        "0 taxonomic_group",
        "1 Canidae",
        "1 genus",
        "2 Canis 5",
        "0 artifact",
    ]


def test_what_the_script_writes_is_read(lines):
    found = wordnet.read(lines)
    assert found.words[:4] == ("animal", "dog", "Rover", "cat")
    assert found.above == (None, 0, 1, 0, None, 4, 4, 6, None)
    assert found.ends == (4, 3, 3, 4, 8, 6, 8, 8, 9)
    assert found.groups[1] == (7, 5)
    assert found.under("dog") == range(1, 3)
    assert found.ancestors(2) == (1, 0)


@pytest.mark.parametrize(
    "text", ["no synset\n", "00000002 05 n zz dog 0 000 | x\n", "00000002 05 n 01 dog 0 000 | x\n"]
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "data.noun"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"WordNet 3\.0"):
        prepare_wordnet.compact(prepare_wordnet.synsets(path))
    with pytest.raises(FileFormatError, match=r"nowhere is not a data\.noun"):
        prepare_wordnet.synsets(tmp_path / "nowhere")


def test_what_is_shipped():
    nouns = wordnet.nouns()
    dog = nouns.under("dog")[0]
    assert [nouns.words[node] for node in nouns.ancestors(dog)] == [
        "canine",
        "carnivore",
        "placental",
        "mammal",
        "vertebrate",
        "chordate",
        "animal",
    ]
    assert [nouns.words[group] for group in nouns.groups[dog]] == ["Canis"]
    assert [len(nouns.under(word)) for word in ("dog", "mammal", "animal", "artifact")] == [189, 1176, 4017, 10504]
    assert len(nouns.words) == 16_987
    # every node ends after itself and inside what it is below
    assert all(
        node < end and (above is None or end <= nouns.ends[above])
        for node, (end, above) in enumerate(zip(nouns.ends, nouns.above, strict=True))
    )


def test_a_word_that_is_not_there():
    with pytest.raises(ArgumentError, match="no synset 'gluon' is shipped"):
        wordnet.nouns().under("gluon")


def test_a_damaged_file_is_refused(monkeypatch):
    monkeypatch.setattr(wordnet, "_SHA256", "0" * 64)
    wordnet.nouns.cache_clear()
    with pytest.raises(FileFormatError, match="checksum of the shipped file"):
        wordnet.nouns()
    wordnet.nouns.cache_clear()
