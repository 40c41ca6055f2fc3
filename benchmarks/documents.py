"""Documents in the memories of a converted model: what merging them costs, and whether a calibrated rule tells
questions that they answer from others.

Merging: two neighbouring passages of a text are read, in one piece or each apart with their memories merged, and the
tokens after them are scored. Refusing: texts say of ten people at what number they live; half of the questions ask for
one of them, half for somebody who is not mentioned. ``hf.calibrate_refusal`` chooses a rule on half of the texts and
measures it on the others. Needs transformers:

    python -m benchmarks.documents --model runs/smol-memory --text novel --threads 1
"""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from zonal import hf
from zonal.data import open_source
from zonal.errors import ArgumentError
from zonal.hf import examine, pretrained

CALL = "bench documents"
PASSAGE, AFTER = 256, 128
WAYS = {
    "both passages in one text": ("both",), "each apart, their memories merged": ("first", "second"),
    "the second alone": ("second",), "the first alone": ("first",),
}  # fmt: skip
PEOPLE = 10
FILLER = 150  # tokens of other sentences in a text of facts


def merging(model: Any, tokenizer: Any, tokens: Sequence[int], places: int) -> dict[str, Any]:
    """Perplexity of the tokens after two passages, by what was read before, and the mean of each place in nats."""
    nats: dict[str, list[float]] = {way: [] for way in WAYS}
    whole = 2 * PASSAGE + AFTER
    for place in range(places):
        start = place * (len(tokens) - whole) // max(1, places - 1)
        first, second, after = (
            tokenizer.decode(tokens[start + a : start + b])
            for a, b in ((0, PASSAGE), (PASSAGE, 2 * PASSAGE), (2 * PASSAGE, whole))
        )
        memory = hf.ContextMemory(model, tokenizer)
        for name, text in (("first", first), ("second", second), ("both", first + second)):
            memory.read(name, text)
        count = len(tokenizer(after, add_special_tokens=False)["input_ids"]) - 1
        for way, names in WAYS.items():
            nats[way].append(-memory.score(after, list(names)) / count)
    return {
        "part": "merging", "places": places, "nats": nats,
        "perplexity": {way: math.exp(sum(each) / places) for way, each in nats.items()},
    }  # fmt: skip


def questions(model: Any, tokenizer: Any, texts: int) -> list[hf.Question]:
    """Two questions for each text: one that it answers, and one that it does not."""
    generator, found = random.Random(1), []

    def encoded(text: str) -> Tensor:
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])

    for _ in range(texts):
        names = list(examine.NAMES)
        generator.shuffle(names)
        known, unknown = names[:PEOPLE], names[PEOPLE:]
        sentences = examine.filler(FILLER, generator, lambda text: encoded(text).shape[1])
        for name in known:
            fact = f"{name} lives at number {generator.randrange(10, 100)}."
            sentences.insert(generator.randrange(len(sentences) + 1), fact)
        cache = hf.MemoryCache()
        with torch.no_grad():
            model(encoded(" ".join(sentences)), **{hf.CACHE: cache}, logits_to_keep=1)
        for name, answered in ((generator.choice(known), True), (generator.choice(unknown), False)):
            found.append(hf.Question(cache.memory(), encoded(f"\n{name} lives at number"), answered))
    return found


def main(argv: Sequence[str]) -> int:
    """Run; 0 when it went through."""
    parser = common.parser(__doc__ or "", "documents")
    parser.add_argument("--model", type=Path, required=True, help="folder of a converted model")
    parser.add_argument("--text", default="novel", help="where passages come from, as --data of zonal train")
    parser.add_argument("--rate", type=float, default=0.1, help="share of answered questions that may be refused")
    options = parser.parse_args(argv)
    run = common.Run(options, only_cpu="converted models are measured on the CPU")
    model, tokenizer = pretrained.opened(CALL, options.model)
    text = "".join(piece for document in open_source(options.text).documents() for piece in document)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(tokens) < 2 * PASSAGE + AFTER:
        raise ArgumentError(f"{CALL}: --text needs at least {2 * PASSAGE + AFTER} tokens, received {len(tokens)}.")
    merged = merging(model, tokenizer, tokens, 2 if options.quick else 6)
    for way, perplexity in merged["perplexity"].items():
        print(f"{way}: perplexity {perplexity:.1f}")
    rule = hf.calibrate_refusal(model, questions(model, tokenizer, 20 if options.quick else 60), rate=options.rate)
    print(rule)
    settings = {"model": options.model.name, "text": Path(options.text).name, "passage": PASSAGE, "after": AFTER}
    run.write([merged, {"part": "refusing", "rule": asdict(rule)}], {}, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
