import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonal.data import corpora, novel, tokenizers
from zonal.errors import ArgumentError, FileFormatError


def test_novel_is_whole():
    text = novel()
    assert text.startswith("CHAPTER 1. Loomings.")
    assert len(text.encode()) == 1_204_997


def test_damaged_novel_is_refused(monkeypatch):
    monkeypatch.setattr(corpora, "_NOVEL_SHA256", "0" * 64)
    with pytest.raises(FileFormatError, match=r"novel: the checksum of the shipped file moby\.txt\.xz does not match"):
        novel()


def test_gpt2_matches_the_published_encoding():
    gpt2 = tokenizers.resolve("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("\n\n").tolist() == [628]
    assert gpt2.decode([15496, 995, gpt2.separator]) == "Hello world<|endoftext|>"
    # text that spells the separator is text, not a separator
    assert gpt2.separator not in gpt2.encode("<|endoftext|>").tolist()


@pytest.mark.parametrize("name", tokenizers.names())
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_round_trip_and_byte_count(name, text):
    tokenizer = tokenizers.resolve(name)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64
    assert tokenizer.decode(tokens.tolist()) == text
    assert int(tokenizer.token_bytes[tokens].sum()) == len(text.encode())


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([" ", "\n", "\t", "\x1c", "\u00a0", "a", "Word", "'s", "12", "!?", "é", "—", "中文"]),
        max_size=200,
    ),
    st.integers(1, 40),
)
def test_pieces_join_to_the_text_and_keep_its_tokens(words, size):
    text = "".join(words)
    cut = list(corpora.pieces(text[at : at + size] for at in range(0, len(text), size)))
    assert "".join(cut) == text
    gpt2 = tokenizers.resolve("gpt2")
    assert [token for piece in cut for token in gpt2.encode(piece).tolist()] == gpt2.encode(text).tolist()


def test_pieces_are_cut():
    assert list(corpora.pieces(["one two three ", "four five six"])) == ["one two three", " four five", " six"]


def test_unknown_tokenizer():
    with pytest.raises(ArgumentError, match=r"unknown tokenizer 'gtp2'. Did you mean 'gpt2'"):
        tokenizers.resolve("gtp2")


@pytest.mark.parametrize("token", [-1, 256])
def test_decode_refuses_tokens_outside_the_vocabulary(token):
    with pytest.raises(ArgumentError, match=rf"\[0, 256\), got {token}"):
        tokenizers.resolve("byte").decode([65, token])


def test_a_cut_character_decodes_to_a_mark():
    assert tokenizers.resolve("byte").decode([0xC3]) == "\ufffd"


def test_damaged_gpt2_files_are_refused(monkeypatch):
    monkeypatch.setattr(tokenizers, "_GPT2_SHA256", {"vocab.bpe": "0" * 64})
    with pytest.raises(FileFormatError, match=r"vocab\.bpe is damaged"):
        tokenizers.GPT2Tokenizer()
