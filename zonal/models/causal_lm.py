"""The causal language model: one token mixer per layer; everything else is shared by all operators."""

import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.memory import Criterion, Reading
from zonal.models import files
from zonal.models.config import ModelConfig
from zonal.models.decoder import ModelDecoder
from zonal.models.memory import ModelMemory, fingerprint
from zonal.models.parts import LanguageModel, Passed
from zonal.models.sampling import Sampler, StopRule
from zonal.names import known_names
from zonal.nn.memory import Past, load_memories
from zonal.nn.positions import check_masks

FINISHED = -1


class Continued(NamedTuple):
    """A continuation, and the state after it.

    tokens: (B, n), −1 in rows after their stop.
    logits: (B, V), for the next token.
    memory: after all of these tokens.
    """

    tokens: Tensor
    logits: Tensor
    memory: ModelMemory


@known_names
class CausalLM(LanguageModel):
    """Embedding, residual blocks, norm, output head.

    ``zonal.models.build(config, seed)`` makes a model whose initial weights are the same for every operator. The
    constructor draws them from torch's global generator.

    Raises: ArgumentError if sizes do not fit.
    """

    def __init__(self, config: ModelConfig) -> None:
        if not config.causal:
            raise ArgumentError("CausalLM: a config with causal=True is required. TextEncoder takes causal=False.")
        super().__init__(config)
        self._known_origin: tuple[tuple[tuple[int, int], ...], str] | None = None
        self.reset_parameters()

    # --- memory -----------------------------------------------------------------------------------------------------

    def empty_memory(
        self,
        batch: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        position: int = 0,
    ) -> ModelMemory:
        """The memory of ``batch`` sequences before their first token. Defaults: the dtype and device of the model.
        position: of the first token.
        """
        layers = tuple(block.attention.empty_memory(batch, dtype, device) for block in self._blocks())
        return ModelMemory(tuple(layer.at(position) for layer in layers) if position else layers, self._origin())

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        memory: ModelMemory,
        *,
        key_padding_mask: Tensor | None = None,
        last_only: bool = False,
        path: str = "auto",
    ) -> tuple[Tensor, ModelMemory]:
        """Read one token or more after those in the memory, without gradients.

        Args:
            tokens: (B, T).
            memory: the past. It is not changed.
            key_padding_mask: bool (B, T), True for a real token.
            last_only: run the output head only at the last position.

        Returns: logits (B, T, V), or (B, 1, V) with ``last_only``, and the memory after the tokens.

        Raises: ArgumentError if tokens or the memory do not fit the model.
        """
        self._check_layers("step", memory)
        logits, after = self.read_on(tokens, memory.layers, key_padding_mask, path, last_only=last_only)
        return logits, ModelMemory(after, memory.origin)  # type: ignore[arg-type]

    @torch.no_grad()
    def step_with_report(
        self,
        tokens: Tensor,
        memory: ModelMemory,
        report: Mapping[int, bool | Criterion],
        *,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, ModelMemory, dict[int, Reading]]:
        """``step``, and what the memory before the tokens says of their queries.

        Args:
            report: layers, by index, each with a criterion or True for the default one.
            tokens, memory, key_padding_mask: as in ``step``.

        Returns: logits (B, T, V), the memory after the tokens, and the readings by layer (``Memory.read``), (B, H, T).

        Raises: ArgumentError if tokens or the memory do not fit the model, or a layer has no evidence.
        """
        self._check_layers("step_with_report", memory)
        if not set(report) <= set(range(len(self.blocks))):
            raise ArgumentError(
                f"CausalLM.step_with_report: report names layers, 0 to {len(self.blocks) - 1}, received "
                f"{sorted(report)}."
            )
        hidden, after, readings = self._read(tokens, memory.layers, key_padding_mask, "auto", report)
        return self._logits(self.norm(hidden)), ModelMemory(after, memory.origin), readings  # type: ignore[arg-type]

    def decoder(self, memory: ModelMemory) -> ModelDecoder:
        """A decoder that continues from a memory, token by token and in place: ``logits = decoder.step(tokens)``.
        ``decoder.memory()`` returns the memory after the steps. The given memory is not changed.

        Raises: ArgumentError if the memory does not fit the model.
        """
        self._check_layers("decoder", memory)
        return ModelDecoder(self.read_on, memory)

    def read_on(
        self,
        tokens: Tensor,
        before: Sequence[Past],
        key_padding_mask: Tensor | None,
        path: str = "auto",
        *,
        last_only: bool,
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Logits after the past of each layer, and the new pasts."""
        hidden, after, _ = self._read(tokens, before, key_padding_mask, path)
        return self._logits(self.norm(hidden[:, -1:] if last_only else hidden)), after

    def prefill(
        self,
        tokens: Tensor,
        memory: ModelMemory | None = None,
        *,
        span: str | None = None,
        chunk: int | None = None,
        key_padding_mask: Tensor | None = None,
        path: str = "auto",
    ) -> tuple[Tensor, ModelMemory]:
        """Read a prompt, without gradients.

        Args:
            tokens: (B, T). Shorter prompts are padded on the left, with ``key_padding_mask``.
            memory: the past, empty or not. It is not changed. None: no past.
            span: a name for the tokens, so that ``ModelMemory.forget`` can forget them.
            chunk: read this many tokens at a time, which bounds the memory that reading takes. None: all at once.
            key_padding_mask: bool (B, T), True for a real token. Operators that read whole chunks (``ska(chunk=…)``)
                count padding: a row then gives what it gives alone only where its padding is a multiple of the chunk.

        Returns: logits (B, V) after the last token, and the memory after it.

        Raises:
            ArgumentError: tokens, mask or memory do not fit the model.
        """
        self._check_tokens("prefill", tokens)
        self._check_ends("prefill", tokens, key_padding_mask)
        if chunk is not None and chunk < 1:
            raise ArgumentError(f"CausalLM.prefill: chunk must be at least 1, received {chunk}.")
        memory = self.empty_memory(tokens.shape[0]) if memory is None else memory
        memory = memory if span is None else memory.open(span)
        size = tokens.shape[1] if chunk is None else chunk
        masks = [None] * -(-tokens.shape[1] // size) if key_padding_mask is None else key_padding_mask.split(size, 1)
        logits = tokens
        for piece, mask in zip(tokens.split(size, 1), masks, strict=True):
            logits, memory = self.step(piece, memory, key_padding_mask=mask, last_only=True, path=path)
        return logits[:, -1], memory if span is None else memory.close()

    def continuation(
        self,
        logits: Tensor,
        memory: ModelMemory,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[int | Sequence[int]] = (),
        seed: int | None = None,
    ) -> Continued:
        """Draw tokens and return the state after them: ``model.continuation(*model.prefill(tokens), 20)``.

        The drawn tokens are also read, so the result can be continued, forked or saved. A row that has met its stop
        reads no more, and continues as it would alone. With named spans or whole chunks (``ska(chunk=…)``) it keeps
        padding for the tokens of the other rows, which ``Window``, ``ALiBi`` and chunks count.

        Args: logits (B, V) and memory from ``prefill`` or an earlier continuation; neither is changed. The others are
            those of ``generate``.
        """
        self._check_layers("continuation", memory)
        if max_new_tokens < 0:
            raise ArgumentError(
                f"CausalLM.continuation: max_new_tokens must not be negative, received {max_new_tokens}."
            )
        if tuple(logits.shape) != (memory.batch, self.config.vocab_size):
            raise ArgumentError(
                f"CausalLM.continuation: logits must be {(memory.batch, self.config.vocab_size)} for this "
                f"memory, received {tuple(logits.shape)}."
            )
        sampler, rule = Sampler(temperature, top_k, top_p), StopRule(stop, memory.batch)
        generator = None if seed is None else torch.Generator(logits.device).manual_seed(seed)
        finished = torch.zeros(memory.batch, dtype=torch.bool, device=logits.device)
        rows = [torch.empty(memory.batch, 0, dtype=torch.int64, device=logits.device)]
        decoder = self.decoder(memory)
        held = [part.memory for layer in memory.layers for part in (layer, *layer.others)]
        ragged = not any(each.parts or each.chunk for each in held)  # these need rows of one length
        stopped: dict[int, ModelMemory] = {}
        for _ in range(max_new_tokens):
            drawn = sampler.draw(logits, generator)
            rows.append(drawn.masked_fill(finished, FINISHED)[:, None])
            mask = ~finished[:, None] if bool(finished.any()) else None
            after = decoder.step(drawn[:, None], key_padding_mask=mask, last_only=True)
            logits = torch.where(finished[:, None], logits, after[:, -1])
            ending = torch.tensor(rule.update(drawn.tolist()), device=logits.device, dtype=torch.bool) & ~finished
            finished = finished | ending
            if bool(finished.all()):
                break
            if ragged and bool(ending.any()):
                now = decoder.memory()
                stopped |= {row: now.gather([row]) for row in ending.nonzero().flatten().tolist()}
        after = decoder.memory()
        if stopped:  # without the padding that the other rows' tokens were for them
            after = after.scatter(list(stopped), ModelMemory.stack(list(stopped.values())))
        return Continued(torch.cat(rows, 1), logits, after)

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[int | Sequence[int]] = (),
        seed: int | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        memory: ModelMemory | None = None,
    ) -> Iterator[Tensor]:
        """Continue prompts token by token. The prompts are read in one call.

        Args:
            tokens: (B, T) prompts. Shorter prompts are padded on the left, with ``key_padding_mask``.
            max_new_tokens: the largest number of new tokens.
            temperature: logits are divided by it. 0: the most likely token.
            top_k: draw only from the k most likely tokens.
            top_p: draw only from the smallest set of most likely tokens whose probability reaches p.
            stop: token ids, or sequences of token ids. A row that ends with one is finished. The stop itself is
                yielded.
            seed: the same seed, prompt and model give the same tokens. None: torch's global generator.
            key_padding_mask: bool (B, T), True for a real token; see ``prefill``.
            memory: what the model has read before ``tokens``. It is not changed.

        Yields: (B,), the next token of each row, −1 for finished rows. Ends when all rows are finished.

        Raises: ArgumentError at once; NonFiniteError for logits that are NaN or infinite, at the token they are for.
        """
        if max_new_tokens < 0:
            raise ArgumentError(f"generate: max_new_tokens must not be negative, received {max_new_tokens}.")
        self._check_tokens("generate", tokens)
        self._check_ends("generate", tokens, key_padding_mask)
        sampler = Sampler(temperature, top_k, top_p)
        rule = StopRule(stop, tokens.shape[0])
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        before = self.empty_memory(tokens.shape[0]) if memory is None else memory
        # checked now; the work below starts with the first next()
        return self._continue(tokens, max_new_tokens, sampler, rule, generator, key_padding_mask, before)

    def _continue(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        sampler: Sampler,
        rule: StopRule,
        generator: torch.Generator | None,
        key_padding_mask: Tensor | None,
        memory: ModelMemory,
    ) -> Iterator[Tensor]:
        finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        decoder = None
        for _ in range(max_new_tokens):
            if decoder is None:
                logits, memory = self.step(tokens, memory, key_padding_mask=key_padding_mask, last_only=True)
                decoder = self.decoder(memory)
            else:
                logits = decoder.step(tokens, last_only=True)
            drawn = sampler.draw(logits[:, -1], generator)
            yield drawn.masked_fill(finished, FINISHED)
            finished = finished | torch.tensor(rule.update(drawn.tolist()), device=tokens.device, dtype=torch.bool)
            if bool(finished.all()):
                return
            tokens = drawn[:, None]

    def load_memory(self, path: str | os.PathLike[str]) -> ModelMemory:
        """The memory that ``ModelMemory.save`` wrote, on the device of the model.

        Raises: FileFormatError if the file is missing, damaged, or belongs to another model.
        """
        empty = self.empty_memory(1)
        return ModelMemory(load_memories(path, empty.layers, empty.origin), empty.origin)

    def memory_bytes(self, length: int) -> int:
        """Bytes of the memory of one sequence after ``length`` tokens, all layers together."""
        if length < 0:
            raise ArgumentError(f"CausalLM.memory_bytes: length must not be negative, received {length}.")
        return sum(block.attention.memory_bytes(length) for block in self._blocks())

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights and config to one safetensors file, completely or not at all."""
        files.save(path, "model", self, self.config.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CausalLM":
        """The model that ``save`` wrote, on the CPU, in its saved dtype.

        Raises: FileFormatError if the file is missing, damaged, or not a model.
        """
        return files.load(path, "model", lambda config: cls(ModelConfig.from_dict(config)))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _read(
        self,
        tokens: Tensor,
        layers: Sequence[Past],
        mask: Tensor | None,
        path: str,
        report: Mapping[int, bool | Criterion] = MappingProxyType({}),
    ) -> Passed:
        """Run the blocks on tokens after the past of each layer."""
        return self._run_blocks(
            self._embed(tokens), layers, key_padding_mask=mask, path=path, action_mask=self._stored(tokens),
            report=report,
        )  # fmt: skip

    def _hidden_in_pieces(
        self, tokens: Tensor, piece: int, mask: Tensor | None, cu_seqlens: Tensor | None, path: str
    ) -> Tensor:
        if piece < 1 or cu_seqlens is not None:
            raise ArgumentError(
                f"CausalLM.predict: piece must be at least 1 and without cu_seqlens, received piece={piece}."
            )
        layers, found = self.empty_memory(tokens.shape[0]).layers, []
        for begin in range(0, tokens.shape[1], piece):
            part = slice(begin, begin + piece)
            hidden, layers, _ = self._read(tokens[:, part], layers, None if mask is None else mask[:, part], path)
            found.append(self.norm(hidden))
        return torch.cat(found, dim=1)

    def _check_layers(self, call: str, memory: ModelMemory) -> None:
        if not isinstance(memory, ModelMemory):
            raise ArgumentError(
                f"CausalLM.{call}: a ModelMemory is required, received {type(memory).__name__}. Make it with "
                "empty_memory() or prefill()."
            )
        if len(memory.layers) != len(self.blocks):
            raise ArgumentError(
                f"CausalLM.{call}: the memory holds {len(memory.layers)} layers, the model has {len(self.blocks)}. "
                "Make it with empty_memory()."
            )

    def _check_ends(self, call: str, tokens: Tensor, key_padding_mask: Tensor | None) -> None:
        batch, length = tokens.shape
        check_masks(f"CausalLM.{call}", batch, length, key_padding_mask, None)
        if key_padding_mask is not None and not bool(key_padding_mask[:, -1].all()):
            raise ArgumentError(
                f"CausalLM.{call}: every prompt must end with a real token. Pad shorter prompts on the left."
            )

    def _origin(self) -> str:
        """The fingerprint of the weights, computed again if one has changed; "" where some are on the meta device, such
        as those that accelerate has offloaded.
        """
        parameters = list(self.parameters())
        if any(parameter.is_meta for parameter in parameters):
            return ""
        state = tuple(
            (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version) for parameter in parameters
        )
        if self._known_origin is None or self._known_origin[0] != state:
            self._known_origin = (state, fingerprint(self))
        return self._known_origin[1]
