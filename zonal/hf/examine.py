"""What a causal model of transformers can do, before and after a conversion: loss by position, recall of what stands in
its context, and the time and bytes of decoding.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from zonal.hf.cache import CACHE, MemoryCache
from zonal.hf.layers import NAME, head_dim, heads, layers_of, operators
from zonal.memory import Memory
from zonal.models.memory import ModelMemory
from zonal.nn import LayerMemory

Encode = Callable[[str], list[int]]

_FILLER = (
    "The road went on past the mill and over the hill.", "Nobody in the village had seen the letter.",
    "It rained for most of the afternoon.", "The old clock in the hall struck four.",
    "She put the book back on the shelf.", "A cart came slowly up the lane.",
)  # fmt: skip
NAMES = (
    "Anna", "Boris", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Karen", "Louis", "Mary",
    "Nora", "Oscar", "Paula", "Ruth", "Simon", "Tina", "Victor",
)  # fmt: skip


@torch.no_grad()
def nats(model: Any, windows: Tensor) -> Tensor:
    """Loss at each position of windows (n, T): -log p of the next token, (n, T - 1) float64."""
    found = []
    for row in windows:
        logits = model(row[None], use_cache=False).logits[0, :-1].float()
        found.append(F.cross_entropy(logits, row[1:], reduction="none").double())
    return torch.stack(found)


def by_position(losses: Tensor, edges: Sequence[int]) -> list[dict[str, float]]:
    """Perplexity of predictions that have more than ``edges[i]`` and at most ``edges[i + 1]`` tokens before them."""
    rows = []
    for low, high in zip(edges, [*edges[1:], losses.shape[1]], strict=True):
        if low < min(high, losses.shape[1]):
            rows.append(
                {"from": low, "to": min(high, losses.shape[1]), "perplexity": float(losses[:, low:high].mean().exp())}
            )
    return rows


@dataclass(frozen=True)
class Question:
    """A text that ends with a question about its content, and the answer."""

    text: str
    answer: str


def needle(length: int, generator: random.Random, count: Callable[[str], int]) -> Question:
    """One number in a text of ``length`` tokens of other sentences, asked for at the end."""
    code = str(generator.randrange(10_000, 100_000))
    fact, asked = f"The secret number is {code}.", "The secret number is"
    sentences = filler(length - count(fact) - count(asked), generator, count)
    sentences.insert(generator.randrange(len(sentences) + 1), fact)
    return Question(" ".join([*sentences, asked]), f" {code}")


def pairs(length: int, generator: random.Random, count: Callable[[str], int]) -> Question:
    """Twenty people with a number each in a text of ``length`` tokens, one of them asked for at the end."""
    names = list(NAMES)
    generator.shuffle(names)
    known = {name: str(generator.randrange(10, 100)) for name in names}
    facts = [f"{name} lives at number {number}." for name, number in known.items()]
    name = generator.choice(names)
    asked = f"{name} lives at number"
    sentences = filler(length - count(" ".join(facts)) - count(asked), generator, count)
    for fact in facts:
        sentences.insert(generator.randrange(len(sentences) + 1), fact)
    return Question(" ".join([*sentences, asked]), f" {known[name]}")


PROBES = {"needle": needle, "pairs": pairs}
"""What is asked: one number in a long text, or one of twenty pairs."""


def filler(length: int, generator: random.Random, count: Callable[[str], int]) -> list[str]:
    """Sentences of at least ``length`` tokens in all."""
    sentences: list[str] = []
    left = length
    while left > 0:
        sentences.append(generator.choice(_FILLER))
        left -= count(sentences[-1])
    return sentences


@torch.no_grad()
def recall(model: Any, encode: Encode, probe: str, length: int, questions: int, seed: int = 0) -> float:
    """The share of questions whose whole answer is the model's most likely continuation, token by token."""
    generator = random.Random(seed)
    right = 0
    for _ in range(questions):
        asked = PROBES[probe](length, generator, lambda text: len(encode(text)))
        text, answer = encode(asked.text), encode(asked.answer)
        logits = model(torch.tensor([text + answer], dtype=torch.int64), use_cache=False).logits[0, len(text) - 1 : -1]
        right += logits.argmax(-1).tolist() == answer
    return right / questions


@torch.no_grad()
def decoding(model: Any, length: int, tokens: int = 16) -> dict[str, float]:
    """Tokens a second after a context of ``length`` tokens, and the bytes of the cache.

    Speed and size depend on the number of keys and not on what they are, so the cache is filled with random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    layers = layers_of("convert", model)

    def drawn(layer: Any) -> Tensor:
        return torch.randn(1, heads(layer)[1], length, head_dim(layer), generator=generator, dtype=torch.float32)

    cache: Any
    if config._attn_implementation == NAME:
        memories = []
        for layer, operator in zip(layers, operators(model), strict=True):
            k, v = drawn(layer), drawn(layer)
            memory = Memory.empty(operator, 1, k.shape[1], k.shape[3], v.shape[3]).absorb(k, v)
            memories.append(LayerMemory(memory, length=length))
        cache = MemoryCache(ModelMemory(tuple(memories)))
        size = cache.memory().nbytes
    else:
        cache = DynamicCache(config=config)
        for index, layer in enumerate(layers):
            cache.update(drawn(layer), drawn(layer), index)
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    token = torch.tensor([[1]], dtype=torch.int64)
    model(token, **{CACHE: cache})  # plans, compiled kernels
    start = time.perf_counter()
    for _ in range(tokens):
        model(token, **{CACHE: cache})
    return {"length": length, "tokens_per_second": tokens / (time.perf_counter() - start), "bytes": float(size)}


@torch.no_grad()
def prefill(model: Any, length: int, vocabulary: int) -> float:
    """Tokens a second of one call on ``length`` random tokens, the second of two."""
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        start = time.perf_counter()
        model(tokens, use_cache=False, logits_to_keep=1)
    return length / (time.perf_counter() - start)


__all__ = ["NAMES", "PROBES", "Question", "by_position", "decoding", "filler", "nats", "prefill", "recall"]
