"""The settings of tasks that callers and the command line may give."""

from dataclasses import dataclass
from typing import Annotated

from zonal.limits import COUNT, SHARE, SIZE, TOKENS, Between, FileName


@dataclass(frozen=True)
class TaskSettings:
    """What is learned. None: as the task has it. A task takes some of these; ``tasks.resolve`` refuses the others."""

    data: Annotated[str | None, FileName()] = None
    """For text: a UTF-8 file, a folder, a pattern, a pre-tokenised corpus, novel, or hub:name[:split[:column]].
    None: the embedded novel."""
    tokenizer: str | None = None
    """For text: what a token is, byte or gpt2. None: byte."""
    length: Annotated[int | None, TOKENS] = None
    """Tokens per sequence."""
    validation_fraction: Annotated[float | None, SHARE] = None
    """For text: the share at its end that is held out. None: 0.1."""
    evaluation_bytes: Annotated[int | None, Between(1, 2**40)] = None
    """For text: evaluate on this many bytes of the held-out part. None: 65536."""
    max_bytes: Annotated[int | None, Between(1, 2**40)] = None
    """For text: read only this many bytes of the source. None: all."""
    train_fraction: Annotated[float | None, SHARE] = None
    """For text: the share of the training part that is used. None: 1."""
    vocab_size: Annotated[int | None, COUNT] = None
    """For recall, retrieval and periodic: size of the vocabulary."""
    pairs: Annotated[int | None, SIZE] = None
    """For recall and retrieval: things to remember; for hypernyms and paths: candidates in the context."""
    train_examples: Annotated[int | None, COUNT] = None
    """For mqar: training sequences."""
    test_examples: Annotated[int | None, COUNT] = None
    """For all but text: test sequences (of retrieval and others, of each kind and size)."""
    subset: str | None = None
    """For hypernyms and paths: the word of WordNet, an animal's or an artifact's, below which entities are taken.
    None: mammal, of paths carnivore."""
    closure: Annotated[float | None, SHARE] = None
    """For hypernyms: the part of the pairs at a distance of 2 or more that is trained. None: 0.5."""
    hops: Annotated[int | None, Between(1, 64)] = None
    """For paths: the most relations in a question. None: 4."""
    questions: Annotated[int | None, SIZE] = None
    """For hypernyms and paths: questions per sequence. None: 8."""
    depth: Annotated[int | None, Between(1, 64)] = None
    """For sexpr: depth of the expressions. None: 5, 10 and 15."""
    frequencies: Annotated[int | None, Between(1, 1024)] = None
    """For periodic: waves in a signal. None: 1, 2, 4 and 8."""
