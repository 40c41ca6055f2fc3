"""Documents in memory: a causal model reads each once, and answers from the memories of some of them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal import store
from zonal.errors import ArgumentError, FileFormatError
from zonal.evaluation.metrics import evaluating
from zonal.hf.cache import CACHE, OperatorCache
from zonal.hf.layers import operators
from zonal.hf.modeling import ZonalForCausalLM
from zonal.hf.pretrained import check_tokens, encoded
from zonal.hf.refusal import Question, Refusal, RefuseUnknown, calibrate_refusal, new_cache
from zonal.models.memory import ModelMemory, fingerprint
from zonal.nn.memory import load_memories
from zonal.training.environment import folder_lock

_INDEX = "documents.json"
_SCHEMA = 1
_WAIT = 60.0  # seconds, for another process that writes to the folder
_PIECE = 1024  # tokens that are read by one call


class Document(NamedTuple):
    """An entry of ``ContextMemory.contents``: its name, the tokens read, the bytes of its memory."""

    name: str
    tokens: int
    nbytes: int


class ContextMemory:
    """What a causal model has read, document by document.

    Each document is read once, by itself, and kept as a memory of its own, whose size does not depend on its length
    where the operators have memories of constant size. A question is read after a copy of a memory, so that many
    questions cost no further reading. The copy of one document's memory gives what the model gives for the document and
    the question in one text.

    Several documents are asked together through the merge of their memories. The merge is exact for each operator:
    sums of sums. The documents have not read each other, though, as they would in one text, and in models with more
    than one layer that makes a difference.

    Args:
        model: a ``ZonalForCausalLM``, or a decoder converted by ``hf.convert``.
        tokenizer: its tokeniser.

    Raises: ArgumentError for other models.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not isinstance(model, ZonalForCausalLM):
            operators(model)  # refuses what was not converted
        self.model: Any = model
        self.tokenizer = tokenizer
        self._documents: dict[str, ModelMemory] = {}

    def read(self, name: str, text: str) -> "Document":
        """Read a document and keep it under a name. It may have any length.

        Raises: ArgumentError for a name that is taken and for a text without tokens; nothing is then kept.
        """
        if name in self._documents:
            raise ArgumentError(f"ContextMemory.read: {name!r} has been read. Forget it first, or choose another name.")
        tokens = self._encoded(text, begins=True)
        if not tokens.shape[1]:
            raise ArgumentError(f"ContextMemory.read: {name!r} has no tokens. Give a text with at least one.")
        cache = new_cache(self.model)
        self._read(tokens, cache)
        self._documents[name] = cache.memory()
        return self._document(name)

    def forget(self, name: str) -> None:
        """Leave a document out from now on. The memories of the others are as if it had never been read.

        Raises: ArgumentError for an unknown name.
        """
        self._known([name], "forget")
        del self._documents[name]

    def contents(self) -> tuple[Document, ...]:
        """The documents in the order in which they were read."""
        return tuple(map(self._document, self._documents))

    def memory(self, names: Iterable[str] | None = None) -> ModelMemory:
        """The memory of some documents, in this order; None = of all. One document's memory is that of its text; those
        of several are merged.

        Raises: ArgumentError for unknown names, one named twice, no document, and operators whose memories cannot be
            merged.
        """
        if isinstance(names, str):
            raise ArgumentError(f"ContextMemory.memory: names must be a list, received {names!r}. Pass [{names!r}].")
        chosen = list(self._documents) if names is None else list(names)
        self._known(chosen, "memory")
        if len({*chosen}) < len(chosen):
            raise ArgumentError(f"ContextMemory.memory: each document can be named once, received {', '.join(chosen)}.")
        if not chosen:
            raise ArgumentError("ContextMemory.memory: at least one document is required. Call read(name, text) first.")
        found = self._documents[chosen[0]].fork()
        for name in chosen[1:]:
            found = found.merge(self._documents[name])
        return found

    @torch.no_grad()
    def ask(
        self, question: str, names: Iterable[str] | None = None, *, refuse: Refusal | None = None, **options: Any
    ) -> str | None:
        """What the model says after the documents and the question; None if the rule refuses the question.

        Args:
            question: text to continue, with what ends a document for the model, such as "\\n\\nQ: …\\nA:".
            names: the documents, in this order; None = all.
            refuse: a rule from ``calibrate``: questions that the documents have no evidence for get no answer.
            options: of ``generate``, such as max_new_tokens and do_sample. Of several sequences, the first is the
                answer. Without eos_token_id, answers end as the model's generation config says, or else with the
                tokenizer's token.

        Raises: ArgumentError as ``memory``, for an empty question, and for a rule where no token ends an answer.
        """
        cache = new_cache(self.model, self.memory(names))
        tokens = self._encoded(question)
        if not tokens.shape[1]:
            raise ArgumentError("ContextMemory.ask: the question has no tokens. Give a text with at least one.")
        read = cache.get_seq_length()
        cache.batch_repeat_interleave(
            max(self._setting(name, options) or 1 for name in ("num_beams", "num_return_sequences"))
        )
        # generate counts the tokens that the cache holds; which they are matters only to penalties
        tokens = torch.cat([tokens[:, :1].expand(1, read), tokens], 1)
        end = self._setting("eos_token_id", options)
        end = self.tokenizer.eos_token_id if end is None else end
        if refuse is not None and end is None:
            raise ArgumentError(
                "ContextMemory.ask: a refused question is answered by the end-of-text token, and neither the model nor "
                "the tokenizer has one. Pass eos_token_id, or leave refuse out."
            )
        rules = [] if refuse is None else [RefuseUnknown(refuse, cache, end)]
        pad = self._setting("pad_token_id", options)
        settings = {
            **options,
            "eos_token_id": end,
            "pad_token_id": self.tokenizer.eos_token_id if pad is None else pad,
            "logits_processor": [*(options.get("logits_processor") or ()), *rules],  # a refusal has the last word
        }
        made = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **{CACHE: cache}, **settings)
        if rules and rules[0].refused is not None and bool(rules[0].refused.any()):
            return None
        return self.tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)

    def score(self, text: str, names: Iterable[str] | None = None) -> float:
        """log p of a text after documents, in nats, summed over its tokens but the first.

        Raises: ArgumentError as ``memory``, and for a text of fewer than two tokens.
        """
        tokens = self._encoded(text)
        if tokens.shape[1] < 2:
            raise ArgumentError(
                "ContextMemory.score: a text of at least two tokens is required; the first has no score."
            )
        logits = self._read(tokens, new_cache(self.model, self.memory(names)), keep=0)
        found = logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])
        return float(found.double().sum())

    def calibrate(
        self, answered: Iterable[str], unanswered: Iterable[str], names: Iterable[str] | None = None, rate: float = 0.05
    ) -> Refusal:
        """A rule for ``ask`` that refuses questions which the documents have no evidence for, and at most ``rate`` of
        the others (``calibrate_refusal``).

        Args:
            answered, unanswered: questions to which the documents hold the answer, and to which they do not, as they
                will be asked.
            names: the documents; None = all.

        Raises: ArgumentError as ``memory`` and ``calibrate_refusal``.
        """
        memory = self.memory(names)
        examples = [(text, True) for text in answered] + [(text, False) for text in unanswered]
        questions = (Question(memory.fork(), self._encoded(text), known) for text, known in examples)
        with evaluating(self.model):
            return calibrate_refusal(self.model, questions, rate)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each document's memory to a file of its own in a folder, and an index. The index is written last, and
        an older one is removed first: a folder that has one is complete.

        Raises: ArgumentError while another process writes to the folder, and for a folder that cannot be made.
        """
        target, entries = Path(folder), []
        with folder_lock(target, wait=_WAIT, call="ContextMemory.save"):
            (target / _INDEX).unlink(missing_ok=True)
            for number, (name, memory) in enumerate(self._documents.items()):
                file = f"document-{number}.safetensors"
                memory.save(target / file)
                entries.append({"name": name, "file": file})
            record = {"schema": _SCHEMA, "model": fingerprint(self.model), "documents": entries}
            store.write_checked(target / _INDEX, record)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Add the documents that ``save`` wrote for this model.

        Raises: FileFormatError for a folder of something else, of another model, or with damaged files; ArgumentError
            for names that are taken. Nothing is then added.
        """
        source = Path(folder)
        record = store.read_record(source / _INDEX, _SCHEMA, "ContextMemory.load", "Read the documents again.")
        if record.get("model") != fingerprint(self.model):
            raise FileFormatError(
                f"ContextMemory.load: {source} was written with other weights. Read the documents again."
            )
        with store.understood("ContextMemory.load", source / _INDEX):
            files = {each["name"]: each["file"] for each in record["documents"]}
            if len(files) < len(record["documents"]) or not all(isinstance(name, str) for name in files):
                raise ValueError("each document must have a name of its own, in text")
            plain = all(Path(file).name == file for file in files.values())
        if not plain:
            raise FileFormatError(f"ContextMemory.load: {source / _INDEX} names files outside of its folder.")
        taken = [name for name in files if name in self._documents]
        if taken:
            raise ArgumentError(f"ContextMemory.load: {taken[0]!r} has been read already. Forget it first.")
        like = new_cache(self.model)  # has the shapes of the layers' memories
        self._read(torch.zeros(1, 1, dtype=torch.int64, device=self.model.device), like)
        layers = like.memory().layers
        self._documents |= {name: ModelMemory(load_memories(source / file, layers)) for name, file in files.items()}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _setting(self, name: str, options: Mapping[str, Any]) -> Any:
        """A setting of ``generate``: of a call's options, their generation config, or the model's; None without."""
        configs = (options.get("generation_config"), self.model.generation_config)
        found = (options.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in found if value is not None), None)

    def _encoded(self, text: str, begins: bool = False) -> Tensor:
        """The tokens of a text (1, T). begins: after the token that the tokenizer puts before a text, if any."""
        ids = encoded("ContextMemory", self.model, self.tokenizer, text)
        first = getattr(self.tokenizer, "bos_token_id", None)
        if begins and ids and first is not None and ids[0] != first and self.tokenizer(text)["input_ids"][0] == first:
            ids = [first, *ids]
            check_tokens("ContextMemory", self.model, ids)
        return torch.tensor([ids], dtype=torch.int64, device=self.model.device)

    def _read(self, tokens: Tensor, cache: OperatorCache, keep: int = 1) -> Tensor:
        """Read tokens (1, T) after what is in the cache, which then holds them as well.

        Returns: logits of the last ``keep`` tokens of each piece that is read by one call, one behind the other; with
            keep = 0, of all tokens.
        """
        with evaluating(self.model):
            pieces = tokens.split(_PIECE, dim=1)
            return torch.cat([self.model(piece, **{CACHE: cache}, logits_to_keep=keep).logits for piece in pieces], 1)

    def _document(self, name: str) -> Document:
        memory = self._documents[name]
        return Document(name, memory.layers[0].length, memory.nbytes)

    def _known(self, names: Iterable[str], verb: str) -> None:
        for name in names:
            if name not in self._documents:
                raise ArgumentError(
                    f"ContextMemory.{verb}: {name!r} has not been read. Known: {', '.join(self._documents) or 'none'}."
                )
