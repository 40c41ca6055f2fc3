"""Folders of documents in one memory: how fast they are read, how large the memory is, and what it finds.

Each document is about 150 words of sentences from the shipped novel, among which stands one fact: "The keeper of the
A traded B for C.", with nouns of WordNet. Questions ask what the keeper of the A traded for C: half of them about
documents that were read, half about others. Documents and questions are the same in every run. The fit that an
answer needs was chosen by other questions.

    python -m benchmarks.ingest --out results/benchmarks/ingest.json

The record is written after each row, and --resume measures the rows that it does not have.
"""

import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common
from zonal import ingest
from zonal.data.corpora import novel
from zonal.data.wordnet import nouns
from zonal.ingest import asking
from zonal.ingest.sums import KEY_DIM
from zonal.ingest.text import words
from zonal.training.environment import commit

CALL = "bench ingest"
WORDS = 150
QUESTIONS = 200
FITS = (0.5, 0.6, 0.7)


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
    spans = asking.Spans(reads)
    texts = [spans.text(number) for number in range(len(spans))]
    having: dict[str, set[int]] = {}
    for place, text in enumerate(texts):
        for word in words(text):
            having.setdefault(word, set()).add(place)
    first = among = exact = 0
    began = time.perf_counter()
    answers = [ingest.ask(archive, fact.question, least=FITS[0]) for fact in known]
    seconds = (time.perf_counter() - began) / len(known)
    right = [bool(got) and fact.text in " ".join(got[0].text.split()) for fact, got in zip(known, answers, strict=True)]
    strange = [ingest.ask(archive, fact.question, least=FITS[0]) for fact in unknown]
    for fact in known:
        asked = [word for word in dict.fromkeys(words(fact.question)) if word not in asking.COMMON]
        places = asking.proposed(archive.memory, reads, asked, asking.CANDIDATES)
        weights = asking.weighed(spans, archive.heads * KEY_DIM, asked)
        among += any(fact.text in texts[place] for place in places)
        first += fact.text in texts[places[0]]
        fits: dict[int, float] = {}
        for word in asked:
            for place in having.get(word, ()):
                fits[place] = fits.get(place, 0.0) + weights[word]
        exact += fact.text in texts[max(fits, key=lambda place: fits[place])]
    found: dict[str, Any] = {}
    for least in FITS:
        fit = [bool(got) and got[0].fit >= least for got in answers]
        found[f"least_{least}"] = {
            "right": sum(a and b for a, b in zip(fit, right, strict=True)) / len(known),
            "wrong": sum(a and not b for a, b in zip(fit, right, strict=True)) / len(known),
            "false": sum(bool(got) and got[0].fit >= least for got in strange) / len(unknown),
        }
    return {
        "questions": len(known), "first": first / len(known), "among": among / len(known), "exact": exact / len(known),
        "ask_ms": 1000 * seconds, **found,
    }  # fmt: skip


def measured(run: common.Run, settings: Mapping[str, Any]) -> None:
    """Measure the rows that are not kept, and write the record after each."""
    options = run.options
    rows = common.kept(run.target, options.resume, settings, run.device)
    known = {(row["part"], row["documents"], row.get("heads", row.get("workers"))) for row in rows}

    def add(row: dict[str, Any]) -> None:
        rows.append(row | {"commit": commit()})
        rows.sort(key=lambda row: (row["part"], row["documents"], row.get("heads", row.get("workers"))))
        print(row, flush=True)
        run.write(rows, {}, settings)

    made = facts(options.documents + 1000 + QUESTIONS)
    texts, unknown = documents(made[: options.documents]), made[-QUESTIONS:]
    with tempfile.TemporaryDirectory() as place:
        for count in [number for number in (100, 1000, 10_000, 100_000) if number <= options.documents]:
            chosen = random.Random(3).sample(range(count), min(QUESTIONS, count))
            for heads in options.heads:
                if ("recall", count, heads) in known:
                    continue
                root, out = Path(place) / f"texts-{count}", Path(place) / f"memory-{count}-{heads}"
                archive = ingest.ingest(written(root, texts[:count]), out, heads=heads).archive
                add({
                    "part": "recall", "documents": count, "heads": heads, "spans": archive.count,
                    "memory_mib": archive.memory.nbytes / 2**20,
                    "text_mib": sum(len(read.data) for read in archive.documents().values()) / 2**20,
                    "folder_mib": sum(file.stat().st_size for file in out.iterdir()) / 2**20,
                    **recalled(archive, [made[number] for number in chosen], unknown[: len(chosen)]),
                })  # fmt: skip
        for workers in options.workers:
            if ("speed", options.documents, workers) in known:
                continue
            root, times = written(Path(place) / f"texts-{options.documents}", texts), []
            for turn in range(options.turns):
                out = Path(place) / f"speed-{workers}-{turn}"
                began = time.perf_counter()
                ingest.ingest(root, out, workers=workers)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            again = ingest.ingest(root, out, workers=workers)
            assert (again.read, again.unchanged) == (0, options.documents)
            add({
                "part": "speed", "documents": options.documents, "workers": workers, "seconds": min(times),
                "documents_per_second": options.documents / min(times), "again_seconds": time.perf_counter() - began,
            })  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = common.parser(__doc__ or "", "ingest", "resume")
    parser.add_argument("--documents", type=int, default=10_000, help="documents at most (default: %(default)s)")
    parser.add_argument("--heads", type=int, nargs="*", default=[16, 64, 256], help="sizes (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="processes (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each reading that is timed (default: %(default)s)")
    run = common.Run(parser.parse_args(argv), only_cpu="folders are read on the CPU")
    measured(run, {"documents": run.options.documents, "turns": run.options.turns})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
