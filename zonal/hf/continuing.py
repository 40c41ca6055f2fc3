"""Continues a prompt with a model of transformers, word by word."""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from zonal.errors import ArgumentError
from zonal.hf.pretrained import check_tokens, drawn_plainly, opened
from zonal.models.sampling import check_logits


def _checked(tokens: Tensor, logits: Tensor) -> Tensor:
    """The logits of the next token as they are, if one can be drawn from them."""
    check_logits(logits)
    return logits


class _Printed(TextStreamer):
    """Prints text as it comes, up to the end of the first ``stop`` that does not lie within the prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Tensor, stop: str | None):
        # prompt and text in one piece: decoders drop the space before a first word
        super().__init__(tokenizer, skip_special_tokens=True)
        self._stop, self._text, self.ended = stop or "", "", False
        self._begin = max(0, len(tokenizer.decode(prompt, skip_special_tokens=True)) - len(self._stop) + 1)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        shown, self._text = len(self._text), self._text + text
        found = self._text.find(self._stop, self._begin) if self._stop else -1
        if found >= 0:
            self.ended, text = True, text[: max(0, found + len(self._stop) - shown)]
        super().on_finalized_text(text, stream_end)

    def ends(self, tokens: Tensor, scores: object) -> Tensor:
        """Whether the stop has come, for each sequence of ``generate``."""
        return torch.full((len(tokens),), self.ended, dtype=torch.bool, device=tokens.device)


def print_continued(
    folder: Path,
    device: torch.device,
    prompt: str,
    count: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: str | None,
    seed: int | None,
) -> None:
    """Print a prompt and the text that follows it, as it comes. Converted models keep the cache of their conversion.

    temperature: 0 = always the most likely token. seed: None = another text each time.

    Raises: ArgumentError for an empty prompt, a model that cannot be read, and a text that is longer than the model's
        table of positions; NonFiniteError for logits that are NaN or infinite.
    """
    model, tokenizer = opened("generate", folder)
    model = model.to(device)
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    check_tokens("generate", model, tokens["input_ids"][0].tolist())
    if not tokens["input_ids"].shape[1]:
        raise ArgumentError("generate: --prompt is empty; at least one token to continue from is required.")
    if seed is not None:
        torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    if not count:
        sys.stdout.write(f"{prompt}\n")
        return
    printed = _Printed(tokenizer, tokens["input_ids"][0], stop)
    try:
        with drawn_plainly(model):
            model.generate(
                **tokens,
                max_new_tokens=count,
                streamer=printed,
                stopping_criteria=[printed.ends],
                pad_token_id=tokenizer.eos_token_id,
                logits_processor=[_checked],
                **(drawn if temperature else {"do_sample": False}),
            )
    except IndexError as error:  # a table of positions that has ended
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        raise ArgumentError(
            f"generate: the model has {limit} positions, and the prompt of {tokens['input_ids'].shape[1]} tokens with "
            f"{count} new ones needs more. Give a shorter prompt, or a smaller --max-new-tokens."
        ) from error


__all__ = ["print_continued"]
