"""Tasks by name, with the settings of the field's papers, and tasks from what a run recorded."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zonal.errors import ArgumentError, FileFormatError, unknown_name
from zonal.names import known_names
from zonal.tasks.algorithmic import ALGORITHMS, Algorithmic
from zonal.tasks.expressions import Expressions
from zonal.tasks.glosses import Glosses
from zonal.tasks.grid import Retrieval, Shape, Stage, grid
from zonal.tasks.lookup import Lookup
from zonal.tasks.masked import MaskedText
from zonal.tasks.mqar import MQAR, Segment
from zonal.tasks.periodic import Periodic
from zonal.tasks.pixels import Pixels
from zonal.tasks.relations import Ancestors, Paths, Source
from zonal.tasks.retrieval import KINDS
from zonal.tasks.settings import TaskSettings
from zonal.tasks.task import Task
from zonal.tasks.text import Text

Given = dict[str, Any]
"""The settings of ``resolve`` that are not None, by name."""


@dataclass(frozen=True)
class _Entry:
    """summary: one line. accepts: the arguments that it takes. make: (its name, those that were given) → the task."""

    summary: str
    accepts: tuple[str, ...]
    make: Callable[[str, Given], Task]


def _retrieval(name: str, given: Given) -> Retrieval:
    """One kind at one shape, without transfer."""
    shape = Shape(
        "mqar" if name == "mqar-gap" else name,
        given.get("pairs", 16 if name.startswith("offset") else 4),
        given.get("length", 64),
    )
    return Retrieval(
        [Stage(0, (shape,))],
        vocab_size=given.get("vocab_size", 128),
        test_examples=given.get("test_examples", 500),
        seed=given.get("seed", 0),
        name=name,
    )


TRANSFER_KINDS = (
    "mqar", "system-prompt", "system-prompt-distractors", "tool-trace", "needle", "two-hop", "two-hop-written",
    "common-word",
)  # fmt: skip
"""The kinds of table 3 of the Echo paper, with two variants that it leaves open."""
MIXED_LENGTHS = (64, 128, 256, 512)
NEEDLE_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
"""The lengths of its table 2: 1 to 64 times the length of training."""


def _mixed(name: str, given: Given) -> Retrieval:
    """Training as the Echo paper's section 4.1 has it: system prompts and tool traces, 64 tokens, first with few pairs,
    then with up to eight. mixed-gaps then draws 64, 128 or 256 tokens for each batch; mixed-hops also teaches two hops,
    at first with the first of them written out.
    """
    kinds, length = ("system-prompt", "system-prompt-distractors", "tool-trace"), NEEDLE_LENGTHS[0]
    lengths = MIXED_LENGTHS[:3] if name == "mixed-gaps" else (length,)
    needle = grid(("needle",), (1,), NEEDLE_LENGTHS)
    several = grid(TRANSFER_KINDS, (1, 4, 8), MIXED_LENGTHS)
    trained = grid(kinds, (1, 2, 4, 8), lengths)
    stages = [Stage(0, grid(kinds, (1, 2, 4), (length,))), Stage(300, trained)]
    if name == "mixed-hops":
        written, hops = (grid((kind,), (1, 2, 4, 8), lengths) for kind in ("two-hop-written", "two-hop"))
        # a sequence asks two hops once and the other kinds up to four times, so two hops come twice as often
        stages[1:] = [Stage(300, (*trained, *written)), Stage(1000, (*trained, *written, *hops, *hops))]
        kinds = (*kinds, "two-hop", "two-hop-written")
    return Retrieval(
        stages,
        test_shapes=grid(kinds, (1, 4, 8), (length,)),
        transfer_shapes=needle if name == "mixed-needle" else tuple(dict.fromkeys((*several, *needle))),
        test_examples=given.get("test_examples", 50),
        transfer_examples=given.get("test_examples", 32),
        seed=given.get("seed", 0),
        name=name,
    )


def _two_hops(name: str, given: Given) -> Retrieval:
    """Two hops, learned in stages: one hop, then two of which the first is written out, then both in the head."""
    hops = ("two-hop", "two-hop-written")
    return Retrieval(
        [
            Stage(0, grid(("needle", "system-prompt", "two-hop-written"), (1, 2), (32,))),
            Stage(400, grid(("system-prompt", *hops), (1, 2, 4), (48,))),
            Stage(1000, grid(("two-hop", "two-hop", "two-hop-written"), (1, 2, 4), (64,))),
        ],
        test_shapes=grid(("two-hop",), (1, 2, 4), (64,)),
        transfer_shapes=grid(hops, (1, 4, 8), (64, 256, 1024, 4096)),
        test_examples=given.get("test_examples", 200),
        transfer_examples=given.get("test_examples", 200),
        seed=given.get("seed", 0),
        name=name,
    )


def _mqar_grid(name: str, given: Given) -> Retrieval:
    """The Echo paper's grid, 4 to 32 pairs by gaps of up to 4096 tokens, learned at short gaps by one model instead of
    cell by cell.

    It begins with few pairs in 64 tokens: from many pairs alone, models of this size learn nothing for a long while.
    """
    shapes = tuple(Shape("mqar", pairs, 256 if pairs == 32 else 128) for pairs in (4, 8, 16, 32))
    return Retrieval(
        [Stage(0, grid(("mqar",), (1, 2, 4, 8), (64,))), Stage(200, shapes)],
        transfer_shapes=grid(("mqar",), (4, 8, 16, 32), (128, 256, 512, 1024, 2048, 4096)),
        test_examples=given.get("test_examples", 50),
        transfer_examples=given.get("test_examples", 32),
        seed=given.get("seed", 0),
        name=name,
    )


def _text(name: str, given: Given) -> Text:
    kind = MaskedText if name == "masked-text" else Text
    return kind(given.pop("data", "novel"), **given, name=name)


def _pixels(name: str, given: Given) -> Pixels:
    side = {"side": math.isqrt(given["length"])} if "length" in given else {}
    if side and side["side"] ** 2 != given["length"]:
        raise ArgumentError(
            f"tasks.resolve: {name!r} reads square pictures; a length such as 49, 196 or 784 is required, the square "
            f"of a side that divides theirs, got {given['length']}."
        )
    folder = {"folder": given["data"]} if "data" in given else {}
    return Pixels(**folder, **side, **_given(given, "test_examples"), name=name)


def _glosses(name: str, given: Given) -> Glosses:
    folder = {"folder": given["data"]} if "data" in given else {}
    return Glosses(**folder, **_given(given, "length", "test_examples"), name=name)


_DEMO = {"vocab_size": 512, "train_examples": 40_000, "test_examples": 1_000, "random_non_queries": False}


def _single(name: str, given: Given) -> MQAR:
    return MQAR(**{**(_DEMO if name == "mqar-demo" else {}), **given}, name=name)


def _based_figure_2(name: str, given: Given) -> MQAR:
    """The data of zoology's arxiv24_based_figure2 (trained there in batches of 256 for 32 epochs)."""
    train = [(64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)]
    test = [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    return MQAR(
        8192,
        train_segments=[Segment(length, pairs, examples) for length, pairs, examples in train],
        test_segments=[Segment(length, pairs, 1_000) for length, pairs in test],
        seed=given.get("seed", 123),
        name=name,
    )


def _iclr24_figure_2(name: str, given: Given) -> MQAR:
    """The data of figure 2 at zoology's tag iclr24, whose generators are seeded with 0 and 10 (trained there for 64
    epochs).
    """
    length = given.get("length", 64)
    if length not in _ICLR24_ROWS:
        raise ArgumentError(
            f"tasks.resolve: the rows of 'mqar-iclr24-fig2' have length {', '.join(map(str, _ICLR24_ROWS))}; "
            f"got {length}."
        )
    pairs = _ICLR24_ROWS[length]
    return MQAR(
        8192,
        train_segments=[Segment(length, pairs, given.get("train_examples", 100_000), seed=0)],
        test_segments=[Segment(length, pairs, given.get("test_examples", 3_000), seed=10)],
        random_non_queries=False,
        name=name,
    )


def _expressions(name: str, given: Given) -> Expressions:
    depths = {"depths": (given["depth"],)} if "depth" in given else {}
    return Expressions(**depths, **_given(given, "test_examples", "seed"), name=name)


def _hypernyms(name: str, given: Given) -> Lookup:
    return _lookup(name, Ancestors(**_given(given, "subset", "closure", "seed")), given)


def _paths(name: str, given: Given) -> Lookup:
    most = {"most": given["hops"]} if "hops" in given else {}
    return _lookup(name, Paths(**most, **_given(given, "subset", "seed")), given)


def _lookup(name: str, source: Source, given: Given) -> Lookup:
    sizes = _given(given, "pairs", "questions", "test_examples", "seed")
    if "pairs" in sizes:
        sizes.setdefault("questions", min(Lookup.questions, sizes["pairs"]))
    return Lookup(source, **sizes, name=name)


def _periodic(name: str, given: Given) -> Periodic:
    counts = {"frequencies": (given["frequencies"],)} if "frequencies" in given else {}
    return Periodic(**counts, **_given(given, "vocab_size", "length", "test_examples", "seed"), name=name)


def _algorithmic(name: str, given: Given) -> Algorithmic:
    length = given.get("length", ALGORITHMS[name].length)
    return Algorithmic(name, length=length, **_given(given, "vocab_size", "test_examples", "seed"))


def _given(given: Given, *names: str) -> Given:
    """What was given of these; the task's own defaults stand for the rest."""
    return {name: given[name] for name in names if name in given}


_ICLR24_ROWS = {64: 4, 128: 8, 256: 16, 512: 64}
_MQAR_ARGUMENTS = (
    "vocab_size", "length", "pairs", "train_examples", "test_examples", "power_a", "random_non_queries", "seed",
)  # fmt: skip
_TEXT_ARGUMENTS = (
    "data", "tokenizer", "length", "validation_fraction", "evaluation_bytes", "max_bytes", "train_fraction",
)  # fmt: skip
_RETRIEVAL_ARGUMENTS = ("vocab_size", "length", "pairs", "test_examples", "seed")
_MIXED_ARGUMENTS = ("test_examples", "seed")
_LOOKUP_ARGUMENTS = ("subset", "pairs", "questions", "test_examples", "seed")

_TASKS = {
    "mqar": _Entry("multi-query associative recall with the numbers you give", _MQAR_ARGUMENTS, _single),
    "mqar-demo": _Entry(
        "vocabulary 512, 64 tokens, 4 pairs, blank fillers; 40,000 training sequences", _MQAR_ARGUMENTS, _single
    ),
    "mqar-8k": _Entry(
        "vocabulary 8192, 64 tokens, 4 pairs, random fillers; 100,000 training sequences", _MQAR_ARGUMENTS, _single
    ),
    "mqar-based-fig2": _Entry(
        "figure 2 of the Based paper: five training shapes, tested on seven up to 1024 tokens and 256 pairs",
        ("seed",),
        _based_figure_2,
    ),
    "mqar-iclr24-fig2": _Entry(
        "figure 2 of the Zoology paper (ICLR 2024); length chooses its row: 64, 128, 256 or 512",
        ("length", "train_examples", "test_examples"),
        _iclr24_figure_2,
    ),
    **{
        name: _Entry(f"retrieval: {kind.about}", _RETRIEVAL_ARGUMENTS, _retrieval)
        for name, kind in KINDS.items()
        if name != "mqar"
    },
    "mqar-gap": _Entry(f"retrieval: {KINDS['mqar'].about}", _RETRIEVAL_ARGUMENTS, _retrieval),
    "mqar-grid": _Entry(
        "mqar-gap with 1 to 8, then 4 to 32 pairs in 64 to 256 tokens; then measured up to 4096 tokens",
        _MIXED_ARGUMENTS,
        _mqar_grid,
    ),
    "mixed": _Entry(
        "system prompts and tool traces of 64 tokens; then measured on eight kinds, up to 4096 tokens",
        _MIXED_ARGUMENTS,
        _mixed,
    ),
    "mixed-gaps": _Entry("as mixed, trained on 64, 128 and 256 tokens", _MIXED_ARGUMENTS, _mixed),
    "mixed-hops": _Entry("as mixed, with two hops taught in stages", _MIXED_ARGUMENTS, _mixed),
    "mixed-needle": _Entry("as mixed; then measured on one needle in 64 to 4096 tokens", _MIXED_ARGUMENTS, _mixed),
    "two-hops": _Entry(
        "two hops in 64 tokens, learned in stages; then measured on up to 8 chains in up to 4096 tokens",
        _MIXED_ARGUMENTS,
        _two_hops,
    ),
    "sexpr": _Entry(
        "the missing subtree of S-expressions of depth 5, 10 and 15, written out",
        ("depth", "test_examples", "seed"),
        _expressions,
    ),
    "hypernyms": _Entry(
        "which candidate is an ancestor in WordNet; tested on pairs that were never trained",
        (*_LOOKUP_ARGUMENTS, "closure"),
        _hypernyms,
    ),
    "paths": _Entry(
        "which candidate is at the end of 1 to 4 relations of WordNet; tested on sequences that were never trained",
        (*_LOOKUP_ARGUMENTS, "hops"),
        _paths,
    ),
    "periodic": _Entry(
        "the next value of a sum of 1, 2, 4 and 8 waves without a common period",
        ("frequencies", "vocab_size", "length", "test_examples", "seed"),
        _periodic,
    ),
    **{
        name: _Entry(f"algorithmic: {algorithm.about}", ("vocab_size", "length", "test_examples", "seed"), _algorithmic)
        for name, algorithm in ALGORITHMS.items()
    },
    "fashion-pixels": _Entry(
        "which piece of clothing a Fashion-MNIST picture shows, read as a sequence of grey levels; by encoders",
        ("data", "length", "test_examples"),
        _pixels,
    ),
    "glosses": _Entry(
        "which of 20,480 nouns of WordNet is defined, by half of the words of its definition; by encoders",
        ("data", "length", "test_examples"),
        _glosses,
    ),
    "masked-text": _Entry(
        "hidden tokens of a text, named from those before and after them, by encoders", _TEXT_ARGUMENTS, _text
    ),
    "text": _Entry("language modelling of the embedded novel or of your own text", _TEXT_ARGUMENTS, _text),
}


def names() -> dict[str, str]:
    """The names ``resolve`` knows, each with one line about it."""
    return {name: entry.summary for name, entry in _TASKS.items()}


@known_names
def resolve(
    name: str,
    settings: TaskSettings | None = None,
    *,
    seed: int | None = None,
    power_a: float | None = None,
    random_non_queries: bool | None = None,
) -> Task:
    """The task called ``name`` with its own settings, except where ``settings`` names one.

    seed: of the drawn data. power_a, random_non_queries: see ``MQAR``.

    Raises: ArgumentError when the name is unknown or a setting does not belong to that task; what the task itself
    raises.
    """
    if name not in _TASKS:
        raise unknown_name("tasks.resolve", "task", name, _TASKS)
    settings = TaskSettings() if settings is None else settings
    own = {"seed": seed, "power_a": power_a, "random_non_queries": random_non_queries}
    named = {field.name: getattr(settings, field.name) for field in dataclasses.fields(TaskSettings)}
    given: Given = {key: value for key, value in {**named, **own}.items() if value is not None}
    for key in given:
        if key not in _TASKS[name].accepts:
            raise ArgumentError(
                f"tasks.resolve: the task {name!r} takes no {key}; it takes: {', '.join(_TASKS[name].accepts)}."
            )
    return _TASKS[name].make(name, given)


_KINDS: dict[str, type[Any]] = {
    kind.kind: kind
    for kind in (Algorithmic, Expressions, Glosses, Lookup, MaskedText, MQAR, Periodic, Pixels, Retrieval, Text)
}


def from_config(config: dict[str, Any]) -> Task:
    """The task whose ``config()`` this is.

    Raises: FileFormatError when it is not such a value; what the task itself raises, as when the text has changed.
    """
    kind = kind_of(config)
    try:
        return kind.from_config(config)
    except (KeyError, TypeError, ArgumentError) as error:
        raise FileFormatError(
            f"tasks.from_config: the configuration of the {kind.kind} task is incomplete or damaged ({error})."
        ) from error


def checked_config(call: str, task: Task) -> dict[str, Any]:
    """``task.config()`` as it is read back from JSON.

    Raises: ArgumentError for what is no object of JSON, and for a type of one's own whose "task" names one of the
    library: later commands and other processes would make that one.
    """
    try:
        found = json.loads(json.dumps(task.config(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{call}: config() of {type(task).__name__} must hold JSON values ({error}).") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{call}: config() of {type(task).__name__} must be a dict of JSON values, got {found!r}.")
    kind = _KINDS.get(found.get("task", ""), type(task))
    if kind is not type(task):
        raise ArgumentError(
            f"{call}: config() of {type(task).__name__} has the 'task' {kind.kind!r}, of which later commands and "
            f"other processes make a {kind.__name__}. Let config() name another 'task'."
        )
    return found


def restored(config: dict[str, Any], given: Task | None) -> Task:
    """``given`` where this is its configuration, as of a task that the library does not know; else by
    ``from_config``.

    Raises: FileFormatError when a task that the library does not know has another configuration.
    """
    mine = None if given is None else checked_config("tasks", given)
    if given is not None and mine == config:
        return given
    if mine is not None and mine.get("task") not in _KINDS:
        raise FileFormatError(
            f"tasks: the task of the folder is {config}, and the given one is {mine}. Use the same task to resume, or "
            "choose another folder."
        )
    return from_config(config)


def kind_of(config: dict[str, Any]) -> type[Any]:
    """The type of the task whose ``config()`` this is. Raises: FileFormatError for one that the library does not
    know.
    """
    name = config.get("task") if isinstance(config, dict) else None
    if name not in _KINDS:
        raise FileFormatError(
            f"tasks.from_config: the configuration's 'task' must be one of {', '.join(_KINDS)}, got {name!r}. Files "
            "and other processes know no task of your own: run its comparison by Comparison(folder, spec).run(jobs=1)."
        )
    return _KINDS[name]
