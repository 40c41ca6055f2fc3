"""Folders of documents in one memory: how fast they are read, how large the memory is, and what it finds.

Each document is about 150 words of sentences from the shipped novel, among which stands one fact: "The keeper of the
A traded B for C.", with nouns of WordNet. Questions ask what the keeper of the A traded for C: half of them about
documents that were read, half about others. Documents and questions are the same in every run.

    python -m benchmarks.ingest --out results/benchmarks/ingest.json
"""

import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from zonal import ingest
from zonal.data.corpora import novel
from zonal.data.wordnet import nouns
from zonal.ingest import asking
from zonal.ingest.text import words

CALL = "bench ingest"
WORDS = 150
QUESTIONS = 200


class Fact(NamedTuple):
    """A sentence of a document, and the question for it."""

    text: str
    question: str


def facts(count: int) -> list[Fact]:
    """Facts of which no two are about the same keeper and the same thing that was received."""
    generator, found = random.Random(0), dict[tuple[str, str], Fact]()
    plain = sorted({word.replace("_", " ") for word in nouns().words})
    while len(found) < count:
        keeper, given, got = (generator.choice(plain) for _ in range(3))
        found[keeper, got] = Fact(
            f"The keeper of the {keeper} traded {given} for {got}.",
            f"What did the keeper of the {keeper} trade for {got}?",
        )
    return list(found.values())


def documents(made: Sequence[Fact]) -> list[str]:
    """Texts with one fact each, at any place."""
    generator = random.Random(1)
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", novel()[10_000:])]
    sentences = [part for part in sentences if 5 <= len(part.split()) <= 40]
    found = []
    for fact in made:
        text: list[str] = []
        while sum(len(part.split()) for part in text) < WORDS:
            text.append(generator.choice(sentences))
        text.insert(generator.randrange(len(text) + 1), fact.text)
        found.append("\n".join(text))
    return found


def written(root: Path, texts: Sequence[str]) -> Path:
    for number, text in enumerate(texts):
        file = root / f"{number // 1000:02}" / f"{number:05}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def recalled(archive: ingest.Archive, known: Sequence[Fact], unknown: Sequence[Fact]) -> dict[str, Any]:
    """What is found of facts that were read, and of others. exact: by reading every span, without the memory."""
    reads = list(archive.documents().values())
    texts = [read.text(span) for read in reads for span in range(len(read.spans))]
    having: dict[str, set[int]] = {}
    for place, text in enumerate(texts):
        for word in words(text):
            having.setdefault(word, set()).add(place)
    first = among = right = exact = 0
    began = time.perf_counter()
    for fact in known:
        answers = ingest.ask(archive, fact.question)
        right += bool(answers) and fact.text in " ".join(answers[0].text.split())
    seconds = (time.perf_counter() - began) / len(known)
    for fact in known:
        asked = [word for word in dict.fromkeys(words(fact.question)) if word not in asking.COMMON]
        places, weights = asking.proposed(archive.memory, reads, asked, asking.CANDIDATES)
        among += any(fact.text in texts[place] for place in places)
        first += fact.text in texts[places[0]]
        fits: dict[int, float] = {}
        for word in asked:
            for place in having.get(word, ()):
                fits[place] = fits.get(place, 0.0) + weights[word]
        exact += fact.text in texts[max(fits, key=lambda place: fits[place])]
    false = sum(bool(ingest.ask(archive, fact.question)) for fact in unknown)
    return {
        "questions": len(known), "first": first / len(known), "among": among / len(known), "right": right / len(known),
        "exact": exact / len(known), "false": false / len(unknown), "ask_ms": 1000 * seconds,
    }  # fmt: skip


def rows(options: Any) -> list[dict[str, Any]]:
    made = facts(options.documents + QUESTIONS)
    texts, unknown = documents(made[: options.documents]), made[options.documents :]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for count in [number for number in (100, 1000, 10_000, 100_000) if number <= options.documents]:
            root = written(Path(place) / f"texts-{count}", texts[:count])
            chosen = random.Random(2).sample(range(count), min(QUESTIONS, count))
            for heads in options.heads:
                out = Path(place) / f"memory-{count}-{heads}"
                archive = ingest.ingest(root, out, heads=heads).archive
                row = {
                    "part": "recall", "documents": count, "heads": heads, "spans": archive.count,
                    "memory_mib": archive.memory.nbytes / 2**20,
                    "text_mib": sum(len(read.data) for read in archive.documents().values()) / 2**20,
                    "folder_mib": sum(file.stat().st_size for file in out.iterdir()) / 2**20,
                    **recalled(archive, [made[number] for number in chosen], unknown[: len(chosen)]),
                }  # fmt: skip
                found.append(row)
                print(row, flush=True)
        root = written(Path(place) / f"texts-{options.documents}", texts)
        for workers in options.workers:
            times = []
            for turn in range(options.turns):
                out = Path(place) / f"speed-{workers}-{turn}"
                began = time.perf_counter()
                ingest.ingest(root, out, workers=workers)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            again = ingest.ingest(root, out, workers=workers)
            assert (again.read, again.unchanged) == (0, options.documents)
            found.append({
                "part": "speed", "documents": options.documents, "workers": workers, "seconds": min(times),
                "documents_per_second": options.documents / min(times), "again_seconds": time.perf_counter() - began,
            })  # fmt: skip
            print(found[-1], flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    parser = common.parser(__doc__ or "", "ingest")
    parser.add_argument("--documents", type=int, default=10_000, help="documents at most (default: %(default)s)")
    parser.add_argument("--heads", type=int, nargs="*", default=[16, 64, 256], help="sizes (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="processes (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each reading that is timed (default: %(default)s)")
    run = common.Run(parser.parse_args(argv))
    run.write(rows(run.options), {}, {"documents": run.options.documents, "turns": run.options.turns})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
