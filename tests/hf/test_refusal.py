"""Questions that the memory holds no answer to are refused: by a trained model that recalls, in ``generate``, by a
context memory, and at the stated rate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import SIZES
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from zonal import hf
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import ModelConfig, build
from zonal.verdict import Verdict

WORDS, PAIRS, END = 64, 4, 0


def texts(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of word and value (rows, 2 PAIRS); a word of each row, and a word that it does not have, (rows, 1)."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.rand(rows, WORDS - 1, generator=generator).argsort(1) + 1
    values = torch.randint(WORDS, 2 * WORDS, (rows, PAIRS), generator=generator)
    pairs = torch.stack([words[:, :PAIRS], values], 2).flatten(1)
    return pairs, words[:, :1], words[:, PAIRS : PAIRS + 1]


@pytest.fixture(scope="module")
def recalling() -> Any:
    """A model of two layers that was trained to name the value of a word."""
    shape = ModelConfig(2 * WORDS, dim=64, layers=("ska(power=1)",) * 2, heads=1, mlp="none", conv=0)
    model = hf.ZonalForCausalLM.of(build(shape, 0), {"eos_token_id": END, "pad_token_id": END})
    descent = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        pairs, word, _ = texts(64, step)
        logits = model(torch.cat([pairs, word], 1), use_cache=False).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, pairs[:, 1])
        descent.zero_grad()
        loss.backward()
        descent.step()
    assert loss < 0.1
    return model.eval()


@torch.no_grad()
def questions(model: Any, count: int, seed: int) -> list[hf.Question]:
    found = []
    for pairs, word, stranger in zip(*(x.split(1) for x in texts(count, seed)), strict=True):
        cache = hf.ZonalCache()
        model(pairs, **{hf.CACHE: cache})
        found += [hf.Question(cache.memory(), word, True), hf.Question(cache.memory(), stranger, False)]
    return found


@torch.no_grad()
def test_a_model_that_recalls_refuses_what_it_has_not_read(recalling: Any, tmp_path: Path) -> None:
    rule = hf.calibrate_refusal(recalling, questions(recalling, 80, 1_000), rate=0.05)
    assert (rule.layer, rule.head) == (0, 0)  # the queries of the second layer are no words
    assert rule.evidence == "support"
    assert rule.auroc > 0.99
    assert rule.refused > 0.95
    rule.save(tmp_path / "rule.json")
    assert hf.Refusal.load(tmp_path / "rule.json") == rule
    refused: dict[bool, list[bool]] = {True: [], False: []}
    for question in questions(recalling, 60, 2_000):
        cache = hf.ZonalCache(question.memory)
        processor = hf.RefuseUnknown(rule, cache, END)
        made = recalling.generate(
            torch.cat([torch.zeros(1, 2 * PAIRS, dtype=torch.int64), question.tokens], 1), **{hf.CACHE: cache},
            logits_processor=[processor], max_new_tokens=1, do_sample=False,
        )  # fmt: skip
        assert processor.refused is not None
        assert bool(processor.refused) == (made[0, -1] == END)
        refused[question.answered].append(bool(processor.refused))
    assert sum(refused[True]) <= 0.15 * 60
    assert sum(refused[False]) >= 0.9 * 60


@torch.no_grad()
def test_a_batch_is_refused_row_by_row(recalling: Any) -> None:
    pairs, word, stranger = texts(2, 5)
    rule = hf.calibrate_refusal(recalling, questions(recalling, 40, 1_000), rate=0.1)
    cache = hf.ZonalCache()
    recalling(pairs, **{hf.CACHE: cache})
    processor = hf.RefuseUnknown(rule, cache, END)
    asked = torch.cat([pairs, torch.cat([word[:1], stranger[1:]])], 1)
    made = recalling.generate(
        asked, **{hf.CACHE: cache}, logits_processor=[processor], max_new_tokens=3, do_sample=False
    )
    assert processor.refused is not None
    assert processor.refused.tolist() == [False, True]
    assert made[0, 2 * PAIRS + 1] == pairs[0, 1]
    assert (made[1, 2 * PAIRS + 1 :] == END).all()


class Tokeniser:
    """Numbers as words."""

    eos_token_id = END

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens: Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens.tolist()))


def test_a_context_memory_says_not_in_memory(recalling: Any) -> None:
    pairs, *_ = texts(1, 9)
    context = hf.ContextMemory(recalling, Tokeniser())
    context.read("pairs", " ".join(map(str, pairs[0].tolist())))
    known = pairs[0, ::2].tolist()
    unknown = [word for word in range(1, WORDS) if word not in known]
    rule = context.calibrate(map(str, known), map(str, unknown[:20]), rate=0.4)
    options = {"refuse": rule, "max_new_tokens": 1, "do_sample": False}
    answers = [context.ask(str(word), **options) for word in known]
    assert sum(answer == str(value) for answer, value in zip(answers, pairs[0, 1::2].tolist(), strict=True)) >= 2
    assert [context.ask(str(word), **options) for word in unknown[20:30]].count(None) >= 9


def test_a_mixture_beside_a_layer_with_evidence_and_a_missing_end() -> None:
    torch.manual_seed(0)
    mixed = "mixture(parts=('ska(power=1)', 'softmax'))"

    def context_of(layers: str) -> hf.ContextMemory:
        shape = hf.ZonalConfig(vocab_size=2 * WORDS, dim=32, layers=layers, heads=2)
        context = hf.ContextMemory(hf.ZonalForCausalLM(shape).eval(), Tokeniser())
        context.read("pairs", "1 70 2 71 3 72 4 73")
        return context

    def rule_of(context: hf.ContextMemory) -> hf.Refusal:
        return context.calibrate(map(str, range(1, 5)), map(str, range(10, 20)), rate=0.4)

    context = context_of(f"{mixed}, ska(power=1)")
    rule = rule_of(context)
    assert rule.layer == 1
    context.tokenizer.eos_token_id = None
    with pytest.raises(ArgumentError, match=r"neither the model nor the tokenizer has one. Pass eos_token_id"):
        context.ask("1", refuse=rule)
    context.ask("1", refuse=rule, eos_token_id=5, max_new_tokens=1)
    with pytest.raises(ArgumentError, match="a mixture has one in each part"):
        rule_of(context_of(mixed))


def test_a_layer_and_a_model_report(recalling: Any) -> None:
    model, (pairs, word, stranger) = recalling.native(), texts(3, 11)
    _, memory = model.prefill(pairs)
    readings = {}
    for name, tokens in (("known", word), ("unknown", stranger)):
        logits, after, found = model.step_with_report(tokens, memory, {0: True})
        assert torch.equal(logits, model.step(tokens, memory)[0])
        assert after.count == memory.count + 1
        readings[name] = found[0]
    assert (readings["known"].verdict == Verdict.ACCEPTED).all()
    assert (readings["known"].support > readings["unknown"].support).all()
    with pytest.raises(ArgumentError, match="report names layers, 0 to 1"):
        model.step_with_report(word, memory, {2: True})
    layer = model.blocks[0].attention
    x = torch.randn(3, 1, 64)
    y, after, reading = layer(x, memory.layers[0], report=True)
    assert torch.equal(y, layer(x, memory.layers[0])[0])
    assert reading.verdict.shape == (3, 1, 1)
    with pytest.raises(ArgumentError, match="report judges queries by a memory"):
        layer(x, report=True)


@torch.no_grad()
def test_converted_models_report_support_and_weights() -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=61, eos_token_id=None, **SIZES)).eval()
    hf.convert(model, "squared_affine", layers=[1], cache="memory")
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(1))
    cache = hf.MemoryCache()
    model(tokens[:, :20], **{hf.CACHE: cache})
    past = cache.fork()
    cache.report = {0: True, 1: True}
    found = model(tokens[:, 20:], **{hf.CACHE: cache}).logits
    assert torch.equal(found, model(tokens[:, 20:], **{hf.CACHE: past}).logits)
    assert past.readings == {}
    softmax, sums = cache.readings[0], cache.readings[1]
    assert softmax.support.shape == sums.support.shape == (2, 4, 10)
    assert sums.weight is None
    assert softmax.weight is not None
    # the largest weight by the definition, the first key left out
    q, k = queries_and_keys(model, tokens)
    scores = 8**-0.5 * q[:, :, 20:] @ k[:, :, :20].mT
    assert torch.allclose(softmax.weight, scores.softmax(-1)[..., 1:].amax(-1), atol=1e-5)


def queries_and_keys(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of the first layer, after rotary positions, key heads repeated."""
    kept: list[Tensor] = []
    cache = hf.MemoryCache()
    read = cache.read

    def reading(layer: int, operator: Any, q: Tensor, k: Tensor, v: Tensor, real: Any) -> Tensor:
        if layer == 0:
            kept.extend([q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)])
        return read(layer, operator, q, k, v, real)

    cache.read = reading  # type: ignore[method-assign]
    model(tokens, **{hf.CACHE: cache})
    return kept[0], kept[1]


def test_what_is_refused(recalling: Any, tmp_path: Path) -> None:
    examples = questions(recalling, 6, 3)
    with pytest.raises(ArgumentError, match=r"at least 38 questions with an answer and 2 without .* received 6 and 6"):
        hf.calibrate_refusal(recalling, examples)
    with pytest.raises(ArgumentError, match=r"rate must lie in \(0, 1\)"):
        hf.calibrate_refusal(recalling, examples, rate=0.0)
    rule = hf.calibrate_refusal(recalling, examples, rate=0.3)
    with pytest.raises(ArgumentError, match="cache has no reading of layer 0"):
        rule.refuses(hf.ZonalCache())
    shape = hf.ZonalConfig(vocab_size=2 * WORDS, dim=32, layers="retention, mamba2", heads=2)
    other = hf.ZonalForCausalLM(shape).eval()
    with pytest.raises(ArgumentError, match="no layer's memory has evidence; the first: it holds sums"):
        hf.calibrate_refusal(other, questions(other, 6, 3), rate=0.3)
    (tmp_path / "other.json").write_text('{"kind": "criterion"}')
    with pytest.raises(FileFormatError, match="holds something else"):
        hf.Refusal.load(tmp_path / "other.json")
    hf.Refusal(0, 0, "luck", "last", 0.0, 0.1, 0.0, 0.5).save(tmp_path / "luck.json")  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match="evidence must be 'support' or 'weight', received 'luck'"):
        hf.Refusal.load(tmp_path / "luck.json")
