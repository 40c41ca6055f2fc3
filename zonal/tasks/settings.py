"""The settings of tasks that callers and the command line may give."""

from dataclasses import dataclass
from typing import Annotated

from zonal.limits import COUNT, SHARE, SIZE, TOKENS, Between, FileName


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a task. None: the default of the task. Each task takes some; ``tasks.resolve`` refuses the others."""

    data: Annotated[str | None, FileName()] = None
    """For text: a file, folder, pattern, tokenised corpus, hub:name[:split[:column]] or novel. None: novel. For
    fashion-pixels and glosses: the folder of the files. None: where the Debian package puts them."""
    tokenizer: str | None = None
    """For text: the tokeniser, byte, gpt2, or a file that `zonal tokenizer` wrote. None: byte."""
    length: Annotated[int | None, TOKENS] = None
    """Tokens per sequence."""
    validation_fraction: Annotated[float | None, SHARE] = None
    """For text: the share at the end that is held out for validation. None: 0.1."""
    evaluation_bytes: Annotated[int | None, Between(1, 2**40)] = None
    """For text: evaluate on about this many bytes, spread over the held-out part. None: 65536."""
    max_bytes: Annotated[int | None, Between(1, 2**40)] = None
    """For text: read only this many bytes of the source. None: all."""
    train_fraction: Annotated[float | None, SHARE] = None
    """For text: the share of the training part that is used. None: 1."""
    vocab_size: Annotated[int | None, COUNT] = None
    """For recall, retrieval, algorithmic tasks and periodic: size of the vocabulary."""
    pairs: Annotated[int | None, SIZE] = None
    """For recall and retrieval: pairs to remember. For hypernyms and paths: candidates in the context."""
    train_examples: Annotated[int | None, COUNT] = None
    """For mqar: training sequences."""
    test_examples: Annotated[int | None, COUNT] = None
    """For all tasks but text: test sequences. For retrieval and some others: of each kind and size."""
    subset: str | None = None
    """For hypernyms and paths: use the words below this word of WordNet. None: mammal, or carnivore for paths."""
    closure: Annotated[float | None, SHARE] = None
    """For hypernyms: the share of the pairs at distance 2 or more that is trained. None: 0.5."""
    hops: Annotated[int | None, Between(1, 4)] = None
    """For paths: the largest number of relations in a question. None: 4."""
    questions: Annotated[int | None, SIZE] = None
    """For hypernyms and paths: questions per sequence. None: 8, or as many as there are pairs."""
    depth: Annotated[int | None, Between(1, 64)] = None
    """For sexpr: depth of the expressions. None: 5, 10 and 15."""
    frequencies: Annotated[int | None, Between(1, 1024)] = None
    """For periodic: waves per signal. None: 1, 2, 4 and 8."""
