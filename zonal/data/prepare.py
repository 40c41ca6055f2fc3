"""From a text source to a token stream, once: the result is kept in the cache folder under a name made of contents and
tokeniser.
"""

import hashlib
import json
import os
from pathlib import Path

from zonal.cache import cache_folder
from zonal.data import corpora, shards
from zonal.data.shards import Corpus
from zonal.data.tokenizers import Tokenizer
from zonal.errors import ArgumentError

_RECIPE = 1  # raised whenever the same text would give other tokens than before


def _documents(source: corpora.Source, max_bytes: int | None):
    return source.documents() if max_bytes is None else corpora.limited(source.documents(), max_bytes)


def _checked_limit(max_bytes: int | None) -> None:
    if max_bytes is not None and max_bytes < 1:
        raise ArgumentError(f"text source: max_bytes must be at least 1 or None, got {max_bytes}.")


def cached_corpus(source: corpora.Source, tokenizer: Tokenizer, *, max_bytes: int | None = None) -> Corpus:
    """The tokens of ``source``, from the cache folder when the same contents were prepared before.

    max_bytes: only so many bytes of UTF-8 from the start; None reads all.
    Raises: FileFormatError when the text cannot be read or the cached corpus is damaged; InsufficientSpaceError when
    the disk is full.
    """
    _checked_limit(max_bytes)
    recipe = json.dumps([_RECIPE, source.fingerprint(), tokenizer.fingerprint, max_bytes])
    target = cache_folder() / "corpora" / hashlib.sha256(recipe.encode()).hexdigest()[:32]
    if not shards.is_corpus(target):
        shards.write_corpus(target, _documents(source, max_bytes), tokenizer, source=source.title)
    return shards.open_corpus(target, tokenizer)


def pretokenise(
    source: str | os.PathLike[str],
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
) -> Corpus:
    """Write the tokens of ``source`` to the new corpus folder ``folder``, to keep or to carry to another machine.

    Raises: ArgumentError when ``folder`` exists; FileFormatError and InsufficientSpaceError as ``cached_corpus``.
    """
    _checked_limit(max_bytes)
    if Path(folder).exists():
        raise ArgumentError(f"pretokenise: {folder} exists already. Remove it or choose another folder.")
    opened = corpora.open_source(source)
    shards.write_corpus(folder, _documents(opened, max_bytes), tokenizer, source=opened.title)
    return shards.open_corpus(folder, tokenizer)
