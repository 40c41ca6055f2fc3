"""Masked language modelling of text: some tokens are hidden, and named from all others, before and after them.

Of each window a share of 0.15 of the tokens is asked, and one more. Of these, 0.8 are replaced by a token that stands
for "hidden", 0.1 by any token, and 0.1 stay as they are, so that every token may be asked. Training hides other tokens
each time that it comes back to a window; evaluation always the same. Source: Devlin et al., "BERT", NAACL 2019,
section 3.1.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from zonal.data.tokenizers import Tokenizer
from zonal.names import known_names
from zonal.tasks.task import IGNORED, TRAIN, Batch, Guess, stream
from zonal.tasks.text import Text

ASKED, HIDDEN, REPLACED = 0.15, 0.8, 0.1
SIGN = "▢"


@known_names
class MaskedText(Text):
    """``Text`` for models in which every token sees the whole window. The loss is that of the hidden tokens, in nats.

    Arguments as of ``Text``. The last token of the vocabulary stands for a hidden one.
    """

    kind, subject, causal, marks = "masked-text", "Masked language modelling", False, 1

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        windows = super().train_batch(step, batch_size, seed).tokens
        return self._hidden(windows, [(seed, step * batch_size + row, TRAIN) for row in range(batch_size)])

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        number = 0
        for windows in super().tested(batch_size, use):
            rows = windows.tokens.shape[0]
            yield self._hidden(windows.tokens, [(number + row, use) for row in range(rows)])
            number += rows

    def _hidden(self, windows: torch.Tensor, keys: Sequence[tuple[int, ...]]) -> Batch:
        """Windows (B, length) with tokens hidden in each row as its key says, at least one."""
        tokens, targets = windows.clone(), torch.full_like(windows, IGNORED)
        for row, key in enumerate(keys):
            chance = stream(*key)
            asked = chance.random(self.length) < ASKED
            asked[chance.integers(self.length)] = True
            places = torch.from_numpy(asked)
            fate, other = chance.random(self.length), chance.integers(0, self.tokenizer.vocab_size, self.length)
            targets[row, places] = windows[row, places]
            tokens[row, places & torch.from_numpy(fate < HIDDEN + REPLACED)] = self.tokenizer.vocab_size
            swapped = places & torch.from_numpy((fate >= HIDDEN) & (fate < HIDDEN + REPLACED))
            tokens[row, swapped] = torch.from_numpy(other)[swapped]
        return Batch(tokens, targets, {})

    def guess(self) -> Guess:
        """The loss of the frequencies of tokens alone."""
        asked = torch.cat([batch.targets[batch.targets != IGNORED] for batch in self.evaluation_batches(64)])
        return Guess(self._loss_of_frequencies(asked.numpy()))

    def describe(self) -> str:
        return f"Hidden tokens ({ASKED:.0%} and one a sequence): {super().describe()}"

    def decode(self, tokens: Sequence[int]) -> str:
        return decoded(self.tokenizer, tokens)


def decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, with ``SIGN`` for each hidden one."""
    runs = itertools.groupby(tokens, lambda token: token == tokenizer.vocab_size)
    return "".join(SIGN * len(list(run)) if hidden else tokenizer.decode(list(run)) for hidden, run in runs)
