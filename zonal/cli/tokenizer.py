"""``zonal tokenizer``: learn a byte-level BPE tokeniser from a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from zonal.cli.options import shown
from zonal.data import open_source, tokenizers
from zonal.data.source import Source
from zonal.errors import ArgumentError
from zonal.limits import SHARE, Between, FileName

DESCRIPTION = """\
Learn byte-level BPE tokens from a text and write them as a tokenizer.json, for `--tokenizer` of `zonal compare` and
`zonal train`. The last part of the text is not read: it is what these commands hold out for validation.

Examples:
  zonal tokenizer --data my.txt --size 4096 --out bpe.json
  zonal compare --task text --data my.txt --tokenizer bpe.json --operators softmax,sko"""


@dataclass(frozen=True)
class TokenizerOptions:
    """Learn a tokeniser from a text."""

    data: Annotated[str, FileName()] = "novel"
    """A file, folder, pattern, hub:name[:split[:column]] or novel."""
    size: Annotated[int, Between(257, 2**24)] = 4096
    """Number of tokens, the 256 bytes and the separator included."""
    validation_fraction: Annotated[float, SHARE] = 0.1
    """The share at the end of the text that is not read."""
    out: Annotated[Path | None, shown("FILE", "required")] = None
    """The file to write, which ends with .json."""


def _pieces(source: Source) -> Iterator[tuple[str, int]]:
    """The pieces of the text and their bytes. A separator between two documents counts as one byte of the later one."""
    earlier = False
    for document in source.documents():
        first = True
        for piece in filter(None, document):
            yield piece, len(piece.encode()) + (earlier and first)
            first = False
        earlier = earlier or not first


def run(options: TokenizerOptions, command: str) -> int:
    """Run the command. Returns 0."""
    if options.out is None:
        raise ArgumentError("tokenizer: --out is required: the file to write, such as bpe.json.")
    if options.out.exists():
        raise ArgumentError(
            f"tokenizer: --out {options.out} exists already; name a new file, or remove that one first."
        )
    source = open_source(options.data)
    total = sum(count for _, count in _pieces(source))
    # as zonal.tasks.text cuts, so that no byte of what it holds out is read
    left = total - int(total * options.validation_fraction)
    if left == 0:
        raise ArgumentError(
            f"tokenizer: --validation-fraction {options.validation_fraction:g} leaves no text of {source.title} to "
            "learn from. Give a smaller share, or more text."
        )

    def texts() -> Iterator[str]:
        read = 0
        for piece, count in _pieces(source):
            read += count
            if read > left:
                yield piece.encode()[: left - read].decode(errors="ignore")
                return
            yield piece

    made = tokenizers.train(texts(), options.size, options.out)
    sample = next(piece for piece, _ in _pieces(source))[:100_000]
    each = len(sample.encode()) / max(1, len(made.encode(sample)))
    print(f"{options.out}: {made.vocab_size:,} tokens, learned from {left:,} bytes of {source.title}; "
          f"{each:.2f} bytes a token at its start.")  # fmt: skip
    return 0
