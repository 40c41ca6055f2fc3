"""``zonal convert``, without the command line: measure the original, train, choose layers, measure again, write."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zonal import store
from zonal.data import open_source
from zonal.errors import ArgumentError
from zonal.hf import examine
from zonal.hf.distil import (
    Distillation,
    Stage,
    Text,
    Transfer,
    Update,
    converted,
    convertible,
    harms,
    learn,
    learned_by,
)
from zonal.hf.pretrained import RECORD, digest_of, drawn_plainly, encoded, opened
from zonal.models.memory import fingerprint
from zonal.report import conversion as report
from zonal.training.environment import folder_lock, surroundings

_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096)
_LENGTHS = (1024, 8192, 32768)
_PREFILL = 1024
_HARM_WINDOWS = 2
_SAMPLE = 60
_TRIED = 2  # tokens that a converted model must be able to continue with before it is trained
_HALVED = 0.75  # the share of attention transfer on windows of half the length
_TOLD = 200  # points of a curve that a record keeps, at most


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is to be converted and how; the options of ``zonal convert``."""

    model: Path
    out: Path
    to: Literal["hybrid", "all"]
    operator: str
    text: str
    plan: bool
    length: int
    transfer_steps: int
    distil_steps: int
    transfer_rate: float
    distil_rate: float
    windows: int
    eval_length: int
    questions: int
    prompt: str
    seed: int
    seconds: float | None

    @property
    def work(self) -> Path:
        """The folder of what a stopped conversion goes on from."""
        return self.out.with_name(f"{self.out.name}.work")

    def identity(self) -> dict[str, Any]:
        """What must be the same to go on."""
        named = {name: value for name, value in vars(self).items() if name not in ("out", "plan")}
        return {**named, "model": self.model.name}


@dataclass(frozen=True)
class Watch:
    """Callbacks: ``say`` prints a line, ``show`` draws an update, ``interrupted`` returns True to stop."""

    say: Callable[[str], Any] = print
    show: Callable[[Update], Any] = lambda update: None
    interrupted: Callable[[], bool] = lambda: False


def run(settings: Settings, command: str, watch: Watch) -> bool:
    """Convert, or go on with a conversion. Returns False if it was stopped.

    Raises: ArgumentError for a model, texts or an operator that do not fit, and for a folder of something else.
    """
    if settings.out.exists():
        raise ArgumentError(f"convert: {settings.out} exists. Choose another folder for the converted model (--out).")
    original, tokenizer = opened("convert", settings.model)
    with folder_lock(settings.work, call="convert"):
        return _Conversion(settings, command, watch, original, tokenizer).run()


class _Conversion:
    def __init__(self, settings: Settings, command: str, watch: Watch, original: Any, tokenizer: Any) -> None:
        self.settings, self.watch, self.original, self.tokenizer = settings, watch, original, tokenizer
        documents = [
            self.encode("".join(piece for document in open_source(spec).documents() for piece in document))
            for spec in settings.text.split(",")
        ]
        self.text = Text.of(documents, settings.windows, settings.eval_length, settings.length)
        digest = hashlib.sha256(self.text.tokens.numpy().tobytes()).hexdigest()[:16]
        wanted = {
            "schema": report.SCHEMA, "settings": settings.identity(), "text": digest,
            "model": fingerprint(original),
        }  # fmt: skip
        path = settings.work / RECORD
        self.record: dict[str, Any] = store.checked(path, store.read_json(path)) if path.exists() else wanted
        different = [name for name in wanted if self.record.get(name) != wanted[name]]
        if different:
            raise ArgumentError(
                f"convert: {settings.work} holds a conversion with other {different[0]}. Use the same settings to go "
                "on, choose another --out, or delete that folder."
            )
        self.record |= {
            "command": command,
            "title": settings.model.stem,
            "layers": self.original.config.get_text_config().num_hidden_layers,
        }

    def encode(self, text: str) -> list[int]:
        return encoded("convert", self.original, self.tokenizer, text)

    # --- stages -----------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        say, settings = self.watch.say, self.settings
        held_out = self.text.held_out.numel()
        say(f"{settings.model.name}: {len(self.text.tokens):,} tokens to learn from, {held_out:,} held out.")
        self._once("surroundings", lambda: surroundings(torch.device("cpu"), torch.get_num_threads()))
        everywhere, candidates = converted(self.original, settings.operator), convertible(self.original)
        kept = [index for index in range(self.record["layers"]) if index not in candidates]
        if kept:
            say(f"Layers {kept} have a sliding window, which bounds their memory, and keep it.")
        self._sample(everywhere, _TRIED)  # what cannot be generated from is refused before anything is trained
        before = self._once("before", lambda: self.measured(self.original, "the original"))
        transfer = self._stage(settings.transfer_steps, settings.transfer_rate, _HALVED)
        if not self.trained(Transfer(everywhere), transfer):
            return False
        few = self.text.held_out[:_HARM_WINDOWS]
        found = self._once("harms", lambda: harms(everywhere, few))
        order = sorted(candidates, key=found.__getitem__)
        say("Layers from the best to convert to the worst: " + ", ".join(f"{i} ({found[i]:+.4f})" for i in order))
        if settings.plan:
            self.timed({"before": self.original})
            say(f"The plan is in {self._written()}. Without --plan, the same command converts.")
            return True
        count = len(order) if settings.to == "all" else max(1, len(order) // 2)
        chosen = self._once("chosen", lambda: sorted(order[:count]))
        learned = learned_by(everywhere)
        model = converted(self.original, settings.operator, {index: learned[index] for index in chosen})
        self._once("transferred", lambda: self.perplexity(model))
        if not self.trained(
            Distillation(model, self.original), self._stage(settings.distil_steps, settings.distil_rate)
        ):
            return False
        model.eval()
        after = self._once("after", lambda: self.measured(model, "the converted model"))
        self.timed({"before": self.original, "after": model})
        page = self._written()
        with store.staged_folder(settings.out) as folder:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            files = {path.name: digest_of(path) for path in sorted(folder.iterdir())}
            store.write_checked(folder / RECORD, {**self.record, "files": files})
            store.write_bytes(folder / page.name, page.read_bytes())
        say(f"Perplexity {before['perplexity']:.2f} before, {after['perplexity']:.2f} after.")
        say(f"{settings.out} holds the model and {page.name}; {settings.work} is no longer needed.")
        say(f"Try: zonal generate --model {settings.out} --prompt '{settings.prompt}'")
        return True

    def _stage(self, steps: int, rate: float, halved: float = 0.0) -> Stage:
        seconds = self.settings.seconds
        return Stage(steps, rate, None if seconds is None else seconds / 2, halved)

    def trained(self, task: Transfer | Distillation, stage: Stage) -> bool:
        """Train. False if a stop was requested, even before the first step."""
        settings, told = self.settings, []
        for update in learn(
            task, stage, self.text, length=settings.length, seed=settings.seed,
            state=settings.work / f"{task.name}.safetensors", interrupted=self.watch.interrupted,
        ):  # fmt: skip
            told.append(update)
            self.watch.show(update)
        self.record[task.name] = _thinned(told)
        self._keep()
        return not self.watch.interrupted()

    # --- measures ---------------------------------------------------------------------------------------------------

    def perplexity(self, model: Any) -> dict[str, Any]:
        """Perplexity on the held-out windows, whole and by position."""
        losses = examine.nats(model, self.text.held_out)
        return {
            "perplexity": float(losses.mean().exp()),
            "nats": losses.mean(1).tolist(),
            "by_position": examine.by_position(losses, _EDGES),
        }

    def measured(self, model: Any, name: str) -> dict[str, Any]:
        """Perplexity, recall and a sample of a model, before or after the conversion."""
        say, settings = self.watch.say, self.settings
        say(f"Measuring {name}: perplexity and recall.")
        try:
            asked = {
                probe: examine.recall(model, self.encode, probe, settings.eval_length, settings.questions)
                for probe in examine.PROBES
            }
        except IndexError as error:  # a table of positions that has ended
            raise ArgumentError(
                f"convert: the model has {_positions(model)} positions, and a question after {settings.eval_length} "
                "tokens needs more. Give a smaller --eval-length."
            ) from error
        found = self.perplexity(model) | {"recall": asked, "sample": self._sample(model)}
        say(f"Perplexity {found['perplexity']:.2f}; recall " + ", ".join(f"{k} {v:.0%}" for k, v in asked.items()))
        return found

    def timed(self, models: Mapping[str, Any]) -> None:
        """Record speed and bytes of the models, measured in turns, since the load of a machine changes over hours."""
        self.watch.say("Measuring time and bytes.")
        vocabulary = self.original.config.get_text_config().vocab_size
        limit = _positions(self.original)
        decoding, prefill = [], min(_PREFILL, limit or _PREFILL)
        try:
            for length in _LENGTHS:
                decoding.append({name: examine.decoding(model, length) for name, model in models.items()})
        except IndexError:  # a table of positions that has ended
            self.watch.say(f"The model has {limit} positions, so decoding after {length:,} tokens is not timed.")
            if not decoding:
                half = prefill // 2
                decoding = [{name: examine.decoding(model, half) for name, model in models.items()}]
        for name, model in models.items():
            self.record[name] |= {
                "decoding": [each[name] for each in decoding],
                "prefill": {"length": prefill, "tokens_per_second": examine.prefill(model, prefill, vocabulary)},
            }
        self._keep()

    def _sample(self, model: Any, count: int = _SAMPLE) -> str:
        tokens = torch.tensor([self.encode(self.settings.prompt)], dtype=torch.int64)
        if not tokens.shape[1]:
            raise ArgumentError("convert: --prompt is empty; at least one token to continue from is required.")
        with drawn_plainly(model):
            made = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False,
                pad_token_id=self.tokenizer.eos_token_id,
            )  # fmt: skip
        return self.tokenizer.decode(made[0], skip_special_tokens=True)

    # --- the record -------------------------------------------------------------------------------------------------

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What the record holds under a name, made the first time."""
        if name not in self.record:
            self.record[name] = make()
            self._keep()
        return self.record[name]

    def _keep(self) -> None:
        store.write_checked(self.settings.work / RECORD, self.record)

    def _written(self) -> Path:
        self._keep()
        return report.write(self.settings.work / "report.html", self.record)


def _positions(model: Any) -> int | None:
    """How many positions the config of a model names; a table of them ends there, rotary positions do not."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _thinned(told: Sequence[Update]) -> list[dict[str, Any]]:
    """About ``_TOLD`` of the updates, the last among them."""
    every = max(1, len(told) // _TOLD)
    return [dataclasses.asdict(update) for index, update in enumerate(told) if (len(told) - 1 - index) % every == 0]


__all__ = ["Settings", "Watch", "run"]
