"""Experiments of papers as settings of ``zonal compare`` and ``zonal train``, scaled to a small machine where that is said, and what the papers print.

A preset fills in options that the command line leaves out. Each lists how its recipe differs from the paper's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.errors import ArgumentError, unknown_name
from zonal.report.published import Published, PublishedRow, PublishedTable
from zonal.tasks.registry import NEEDLE_LENGTHS

OPTION = "--preset"


@dataclass(frozen=True)
class Preset:
    """about: one line. models: label → spec of the model's layers, the first for ``zonal train``. The rest are options of the commands."""

    about: str
    models: Mapping[str, str]
    seeds: str
    learning_rate: str
    task: TaskOptions
    model: ModelOptions
    training: TrainingOptions
    published: Published

    @property
    def operators(self) -> str:
        return ",".join(self.models.values())

    @property
    def labels(self) -> dict[str, str]:
        """Names for people, by spec."""
        return {spec: label for label, spec in self.models.items()}


def named(words: Sequence[str], command: str) -> str | None:
    """The name after --preset among the words of a command line. Raises: ArgumentError when it is missing or unknown."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == OPTION:
            if not equals and place + 1 == len(words):
                raise ArgumentError(f"{command}: {OPTION} requires a name. Presets: {', '.join(PRESETS)}.")
            found = value if equals else words[place + 1]
            find(found, command)
            return found
    return None


def find(name: str, command: str) -> Preset:
    """The preset of that name. Raises: ArgumentError when there is none."""
    if name not in PRESETS:
        raise unknown_name(command, "preset", name, PRESETS)
    return PRESETS[name]


def _hybrid(*last: str) -> str:
    """Two Mamba-2 layers below two others."""
    return f"[mamba2(state=16)*2, {', '.join(last) if len(set(last)) > 1 else f'{last[0]}*{len(last)}'}]"


_CHUNK = 16
_PAPERS_FORM = "eps=0.001, key_limit=None, running_max=True"
_TRANSFER_MODELS = {
    "SKA K=0": _hybrid("ska(power=0)", "ska(power=0)"),
    "SKA K=1": _hybrid("ska(power=1)", "ska(power=1)"),
    "SKA K=2": _hybrid("ska(power=2)", "ska(power=2)"),
    "SKA K=0, 1": _hybrid("ska(power=0)", "ska(power=1)"),
    f"SKA K=2, paper's form, chunks of {_CHUNK}": _hybrid(*[f"ska(power=2, chunk={_CHUNK}, {_PAPERS_FORM})"] * 2),
    f"SKA K=0, chunks of {_CHUNK}": _hybrid(*[f"ska(power=0, chunk={_CHUNK})"] * 2),
    "Softmax": _hybrid("softmax", "softmax"),
    "Mamba-2 alone": "mamba2(state=16)",
}
_SOURCE = "Sridhar and Johansen, Echo: KV-Cache-Free Associative Recall with Spectral Koopman Operators, 2026"
_COLUMNS = ("paper: SSM", "paper: SSM + attention", "paper: SSM + SKA")

_TABLE_2 = PublishedTable(
    "Length generalisation, one needle (its table 2; trained at 64 tokens)",
    _COLUMNS,
    tuple(
        PublishedRow(f"{length} tokens", {"task": "needle", "pairs": 1, "length": length}, values)
        for length, values in zip(
            NEEDLE_LENGTHS,
            (
                (0.886, 0.885, 0.945), (0.821, 0.974, 0.894), (0.758, 0.929, 0.933), (0.669, 0.781, 0.956), (0.373, 0.648, 0.864),
                (0.020, 0.425, 0.812), (0.020, 0.050, 0.651),
            ),
            strict=True,
        )
    ),
)  # fmt: skip
_TABLE_3 = PublishedTable(
    "Mean accuracy over numbers of pairs and lengths (its table 3)",
    _COLUMNS,
    (
        PublishedRow("MQAR", {"task": "mqar"}, (0.551, 0.760, 0.822)),
        PublishedRow("System prompt", {"task": "system-prompt"}, (0.642, 0.813, 0.853)),
        PublishedRow("System prompt, distractors", {"task": "system-prompt-distractors"}, (None, None, None)),
        PublishedRow("Tool trace", {"task": "tool-trace"}, (0.565, 0.762, 0.805)),
        PublishedRow("Needle in a haystack", {"task": "needle"}, (0.520, 0.811, 0.842)),
        PublishedRow("Two hops", {"task": "two-hop"}, (0.393, 0.711, 0.767)),
        PublishedRow("Two hops, the first written out", {"task": "two-hop-written"}, (None, None, None)),
        PublishedRow("Common word", {"task": "common-word"}, (0.529, 0.682, 0.741)),
    ),
)
_GRID = PublishedTable(
    "Recall by number of pairs and length (its section 5.2: 50M parameters, each cell trained by itself)",
    ("paper: Mamba-2", "paper: + attention", "paper: + SKA"),
    tuple(
        PublishedRow(f"{pairs} pairs, {length} tokens", {"task": "mqar", "pairs": pairs, "length": length}, (0.03, None if pairs == 4 and length == 4096 else 1.0, 1.0))
        for pairs in (4, 8, 16, 32)
        for length in (128, 256, 512, 1024, 2048, 4096)
        if pairs < 32 or length > 128
    ),
)  # fmt: skip


def _recipe(steps: int, rate: str, batch: int, parameters: str, *more: tuple[str, str, str]) -> tuple[tuple[str, str, str], ...]:
    return (
        ("width, layers, heads", "128, 4, 4", "128, 4, 4"),
        ("parameters", "982k to 1.11M", parameters),
        ("layers", "2 Mamba-2 (state 16) + 2 SKA or 2 causal attention; or 4 Mamba-2", "the same"),
        ("rank r of SKA", "24", "32, the head size"),
        ("positions of attention", "rotary", "none: the Mamba-2 layers know the order"),
        ("SKA", "K = 2, chunks or the whole prefix", "K = 0, 1, 2 and both in one model, exact to the token; and in chunks of 16"),
        ("vocabulary", "128", "128: 7 markers, 15 noise, 53 keys, 53 values"),
        ("optimiser", "AdamW (0.9, 0.95), decay 0.01, clipping 1, warm-up and cosine", "the same"),
        ("learning rate, steps, batch", "3e-4, 6000, 16", f"{rate}, {steps}, {batch}"),
        ("seeds", "not said", "as many as the page says"),
        *more,
    )


_NOTES = (
    "The paper gives no generator: formats beyond its two fragments are this library's, so its numbers and these are of like tasks, not of the same.",
    "The paper calls five tasks held out; two of them, system prompts and tool traces, are what it trained on.",
    "The means printed under its table 3 (54.4, 76.2, 81.1) are not those of its rows (53.3, 75.7, 80.5).",
    "A guess among the answers that a context offers is right in 1 of as many as there are pairs: 1, 1/4 and 1/8 here.",
)

_RATE, _STEPS, _BATCH = "2e-3", 1500, 32
_TRAINING = TrainingOptions(
    steps=_STEPS, batch_size=_BATCH, weight_decay=0.01, warmup_ratio=0.1, eval_every=150, eval_batch_size=50, transfer_piece=512, tensorboard=False
)
_MODEL = ModelOptions(layers=4, dim=128, heads=4, mlp_ratio=3.0, conv=0, tie_embeddings=False)

PRESETS: dict[str, Preset] = {
    "echo-table2": Preset(
        "length generalisation of the Echo paper: one needle in 64 to 4096 tokens after training at 64",
        {label: spec for label, spec in _TRANSFER_MODELS.items() if label in ("SKA K=0", "SKA K=2", "Softmax", "Mamba-2 alone")},
        "2", _RATE, TaskOptions(task="mixed-needle"), _MODEL, _TRAINING,
        Published(_SOURCE, (_TABLE_2,), _recipe(_STEPS, _RATE, _BATCH, "964k to 1.04M"), _NOTES[:1]),
    ),
    "echo-table3": Preset(
        "zero-shot transfer of the Echo paper: trained on system prompts and tool traces, measured on eight kinds and up to 4096 tokens",
        _TRANSFER_MODELS, "2", _RATE, TaskOptions(task="mixed"), _MODEL, _TRAINING,
        Published(_SOURCE, (_TABLE_3, _TABLE_2), _recipe(_STEPS, _RATE, _BATCH, "964k to 1.04M"), _NOTES),
    ),
}  # fmt: skip
