"""Texts, tokenisers and token streams on disk. Nothing here needs a model."""

from zonal.cache import cache_folder
from zonal.data import tokenizers
from zonal.data.corpora import Source, novel, open_source
from zonal.data.permutation import permuted, shuffled_rows
from zonal.data.prepare import cached_corpus, pretokenise
from zonal.data.shards import Corpus, is_corpus, open_corpus, write_corpus
from zonal.data.tokenizers import Tokenizer

__all__ = [
    "Corpus",
    "Source",
    "Tokenizer",
    "cache_folder",
    "cached_corpus",
    "is_corpus",
    "novel",
    "open_corpus",
    "open_source",
    "permuted",
    "pretokenise",
    "shuffled_rows",
    "tokenizers",
    "write_corpus",
]
