"""Saying "not in memory": a rule that refuses questions which the memory of a model has no evidence for, calibrated on
questions with and without an answer.
"""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers import LogitsProcessor

from zonal.errors import ArgumentError
from zonal.evaluation.verdicts import auroc
from zonal.hf.cache import CACHE, MemoryCache, OperatorCache, ZonalCache
from zonal.hf.modeling import ZonalForCausalLM
from zonal.memory import Criterion, Reading
from zonal.memory.criterion import load_rule, save_rule
from zonal.models.memory import ModelMemory

_KIND = "refusal"
Kind = Literal["support", "weight"]
Over = Literal["last", "mean"]
_KINDS: list[tuple[Kind, Over]] = [*itertools.product(get_args(Kind), get_args(Over))]


class Question(NamedTuple):
    """An example for ``calibrate_refusal``: a memory, tokens (1, T) that are read after it, and whether the memory
    holds the answer.
    """

    memory: ModelMemory
    tokens: Tensor
    answered: bool


@dataclass(frozen=True)
class Refusal:
    """The rule of ``calibrate_refusal``: a question is refused when one head of one layer finds too little in memory.

    Args:
        layer, head: whose queries are looked at.
        evidence: what they find: "support" or "weight" (``zonal.memory.Reading``).
        over: of which tokens of the question: "last", or the "mean" over all.
        threshold: a question is refused at this evidence or less.
        rate: at most this part of the questions with an answer is refused, if they are like the examples.
        refused: the part of the examples without an answer that is refused.
        auroc: how well the evidence tells the examples apart: 1 entirely, 0.5 not at all.

    The last two were measured on examples that had no part in the choice of layer, head and evidence.
    """

    layer: int
    head: int
    evidence: Kind
    over: Over
    threshold: float
    rate: float
    refused: float
    auroc: float

    @property
    def report(self) -> dict[int, bool | Criterion]:
        """What a cache is to report on: ``cache.report = refusal.report``."""
        return {self.layer: True}

    def refuses(self, cache: OperatorCache, real: Tensor | None = None) -> Tensor:
        """Which sequences are refused, bool (B,), by the cache's report on the call that has read the question.

        real: bool (B, T), which tokens of that call are no padding; None = all.

        Raises: ArgumentError for a cache that has not reported on the layer.
        """
        reading = cache.readings.get(self.layer)
        if reading is None:
            raise ArgumentError(
                f"Refusal.refuses: the cache has no reading of layer {self.layer}. Set cache.report = refusal.report "
                "before the model reads the question."
            )
        return _found(reading, real)[:, _KINDS.index((self.evidence, self.over)), self.head] <= self.threshold

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a JSON file, atomically."""
        save_rule(path, _KIND, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Refusal":
        """Read a file of ``save``. Raises: FileFormatError for missing, damaged and foreign files."""
        return load_rule(path, _KIND, Refusal)


def _found(reading: Reading, real: Tensor | None = None) -> Tensor:
    """The evidence (B, 4, H) for questions: support of the last token and in the mean, weight likewise. 0 without."""
    found = []
    for evidence in (reading.support, reading.weight):
        evidence = torch.zeros_like(reading.support) if evidence is None else evidence
        counted = torch.ones_like(evidence) if real is None else real[:, None].to(evidence).expand_as(evidence)
        found += [evidence[..., -1], (evidence * counted).sum(-1) / counted.sum(-1).clamp_min(1)]
    return torch.stack(found, 1).double()


class RefuseUnknown(LogitsProcessor):
    """Ends the answer of refused questions at once, in ``generate(..., logits_processor=[RefuseUnknown(...)])``: the
    end-of-text token is then their whole answer. After ``generate``, ``refused`` (B,) says which these are.

    The decision is taken once, when the question has been read. A processor is for one call of ``generate``.

    Args:
        refusal: the rule.
        cache: the cache that ``generate`` is given, with the memory that is asked. It then reports to the rule.
        end: the end-of-text token, or several of which the first is taken.
        real: bool (B, T), which tokens of the questions are no padding; None = all.
    """

    def __init__(
        self, refusal: Refusal, cache: OperatorCache, end: int | Sequence[int], real: Tensor | None = None
    ) -> None:
        self.refusal, self.cache, self.real = refusal, cache, real
        self.end = end if isinstance(end, int) else end[0]
        self.refused: Tensor | None = None
        cache.report = refusal.report

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.refused is None:
            self.refused = self.refusal.refuses(self.cache, self.real)
            self.cache.report = {}  # what the answer reads is no evidence
        ended = torch.full_like(scores, float("-inf"))
        ended[:, self.end] = 0
        return torch.where(self.refused[:, None], ended, scores)


def new_cache(model: Any, memory: ModelMemory | None = None) -> OperatorCache:
    """The cache of a ``ZonalForCausalLM`` or a converted model, with what it has read."""
    return ZonalCache(memory) if isinstance(model, ZonalForCausalLM) else MemoryCache(memory)


@torch.no_grad()
def calibrate_refusal(model: Any, examples: Iterable[Question], rate: float = 0.05) -> Refusal:
    """The rule that refuses at most ``rate`` of the questions that have an answer, from examples with and without one.

    Every second example chooses the layer, the head and the evidence that tell the two kinds apart best. The others set
    the threshold: of n numbers that could come in any order, the next one is below the k-th smallest with a probability
    of at most k / (n + 1). So n >= 1 / rate - 1 answered examples are needed there, twice as many in all.

    Args:
        model: a ``ZonalForCausalLM``, or a decoder converted by ``hf.convert``, for inference.
        examples: questions as they will be asked, after memories as they will be.

    Raises: ArgumentError for a rate outside (0, 1), too few examples, memories without evidence, and evidence that is 0
        for more than ``rate`` of the answered questions.
    """
    call = "hf.calibrate_refusal"
    if not 0 < rate < 1:
        raise ArgumentError(f"{call}: rate must lie in (0, 1), received {rate!r}. 0.05 refuses one in twenty.")
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    layers: list[int] = []
    for question in examples:
        asked = question.memory.layers
        # the parts of a mixture have evidence each, and a layer none
        layers = [i for i, layer in enumerate(asked) if not layer.others and layer.memory.evidence_refusal is None]
        if not layers:
            raise ArgumentError(
                f"{call}: no layer's memory has evidence; the first: "
                f"{asked[0].memory.evidence_refusal or 'a mixture has one in each part'}. Use an operator that solves, "
                "such as ska, or softmax, in one layer at least."
            )
        cache = new_cache(model, question.memory)
        cache.report = dict.fromkeys(layers, True)
        model(question.tokens, **{CACHE: cache}, logits_to_keep=1)
        found[question.answered].append(torch.stack([_found(cache.readings[layer])[0] for layer in layers]))
    needed = 2 * (math.ceil(1 / rate) - 1)
    if len(found[True]) < needed or len(found[False]) < 2:
        raise ArgumentError(
            f"{call}: at least {needed} questions with an answer and 2 without one are required for rate {rate:g}, "
            f"received {len(found[True])} and {len(found[False])}. Give more, or a larger rate."
        )
    known, unknown = (torch.stack(found[answered]) for answered in (True, False))  # (n, layers, kinds, H)
    place, kind, head = _best(known[::2], unknown[::2])
    stored, strange = known[1::2, place, kind, head].sort().values, unknown[1::2, place, kind, head].contiguous()
    least = stored[math.floor(rate * (len(stored) + 1) * (1 + 1e-12)) - 1]
    if not least:
        raise ArgumentError(
            f"{call}: more than {rate:g} of the questions with an answer have no evidence in memory, so that nothing "
            "can be refused at this rate. Give a larger rate, or an operator with more evidence, such as ska."
        )
    threshold = torch.nextafter(least, least.new_tensor(0.0))
    evidence, over = _KINDS[kind]
    refused = float((strange <= threshold).double().mean())
    return Refusal(layers[place], head, evidence, over, float(threshold), rate, refused, auroc(stored, strange))


def _best(known: Tensor, unknown: Tensor) -> tuple[int, int, int]:
    """Layer, kind of evidence and head that tell (n, layers, kinds, H) apart best: by AUROC, then by how many standard
    deviations lie between the means.
    """
    gap = (known.mean(0) - unknown.mean(0)) / (known.std(0, correction=0) + unknown.std(0, correction=0) + 1e-12)

    def apart(at: tuple[int, int, int]) -> tuple[float, float]:
        return auroc(known[:, *at].contiguous(), unknown[:, *at].contiguous()), float(gap[at])

    layers, kinds, heads = map(range, gap.shape)
    there = (known != 0).any(0)
    return max((at for at in itertools.product(layers, kinds, heads) if there[at]), key=apart, default=(0, 0, 0))


__all__ = ["Question", "Refusal", "RefuseUnknown", "calibrate_refusal", "new_cache"]
