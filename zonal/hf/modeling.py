"""The models of this library for transformers: classes for generate, Trainer, PEFT, pipelines and the Auto classes."""

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from zonal import models
from zonal.errors import ArgumentError
from zonal.hf.cache import CACHE, OperatorCache, ZonalCache, start_generation
from zonal.hf.configuration import ZonalConfig, ZonalVisionConfig
from zonal.hf.packing import document_offsets
from zonal.models.causal_lm import CausalLM
from zonal.models.encoder import VisionEncoder
from zonal.models.text_encoder import TextEncoder
from zonal.nn import Block, Records
from zonal.nn.memory import Past
from zonal.stretch import active

# arguments of other models, which would change the output
_FOREIGN = ("token_type_ids", "head_mask", "encoder_hidden_states", "encoder_attention_mask", "is_causal")


class ZonalPreTrainedModel(PreTrainedModel):
    """What all models here share: config, initial weights, gradient checkpointing of blocks."""

    config_class = ZonalConfig
    config: ZonalConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["CheckpointedBlock"]
    _keep_in_fp32_modules_strict: ClassVar = ["operator"]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw all weights from torch's global generator, but for those that a file gave."""
        for module in self.modules():
            if isinstance(module, CausalLM | TextEncoder | VisionEncoder):
                drawn = type(module)(module.config).state_dict()  # type: ignore[arg-type]
                for name, value in module.state_dict(keep_vars=True).items():
                    if not getattr(value, "_is_hf_initialized", False):
                        value.copy_(drawn[name])
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a head; transformers asks for each module of the model."""
        if isinstance(module, nn.Linear) and module in (getattr(self, "lm_head", None), getattr(self, "score", None)):
            init.normal_(module.weight, std=self.config.shape.init_std)

    def _refuse_weights(self, output_attentions: bool | None) -> None:
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ArgumentError(
                f"{type(self).__name__}: output_attentions is not available; operators do not make the matrix of "
                "weights. attention.weights(x) of a block of this library computes it for one layer."
            )


def _asks(value: Any) -> bool:
    """Whether an argument asks for something: a value other than None and zeros, such as the type of one text."""
    return bool(value.any()) if isinstance(value, Tensor) else value is not None


def _check_others(others: Mapping[str, Any], position_ids: Tensor | None) -> None:
    """Raise ArgumentError for arguments of other models, and for packed documents without positions."""
    foreign = next((name for name in _FOREIGN if _asks(others.get(name))), None)
    if foreign is not None:
        raise ArgumentError(
            f"ZonalModel: {foreign} is for other models. Leave it out; if a tokenizer makes it, load the tokenizer "
            "with model_input_names=['input_ids', 'attention_mask']."
        )
    if others.get("cu_seq_lens_q") is not None and position_ids is None:
        raise ArgumentError(
            "ZonalModel: packed documents are told apart by position_ids, and only cu_seq_lens_q was given. Give "
            "position_ids that start again from 0 with each document."
        )


class CheckpointedBlock(Block, GradientCheckpointingLayer):
    """A block that transformers can checkpoint: its activations are then computed again in the backward pass."""

    _gradient_checkpointing_func: functools.partial[Any]  # given by transformers with its settings

    def __call__(self, records: Tensor | Records, past: Past | None = None, **others: Any) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            reentrant = self._gradient_checkpointing_func.keywords["use_reentrant"]
            if reentrant and (isinstance(records, tuple) or past is not None):
                raise ArgumentError(
                    "ZonalModel: a block that reads a cache, or with residual='dense' a tuple of tensors, loses their "
                    "gradients in a reentrant checkpoint. Enable checkpointing with use_reentrant=False."
                )
            if past is not None:  # a decoder takes tokens in place, and the backward pass reads them again
                past = past.value()
        return super().__call__(records, past, **others)


class Decoder(CausalLM):
    """The decoder, of such blocks."""

    block = CheckpointedBlock


class Encoder(TextEncoder):
    """The encoder, of such blocks."""

    block = CheckpointedBlock


class PatchEncoder(models.Encoder):
    """The encoder of patches of an image, of such blocks."""

    block = CheckpointedBlock


class ImageClassifier(VisionEncoder):
    """The image classifier, of such blocks."""

    stack = PatchEncoder


class ZonalModel(ZonalPreTrainedModel):
    """Embedding, residual blocks and norm, without a head: ``AutoModel``.

    With ``config.causal`` it is the decoder ``zonal.models.CausalLM``, else the encoder ``zonal.models.TextEncoder``.
    """

    def __init__(self, config: ZonalConfig) -> None:
        super().__init__(config)
        shape = dataclasses.replace(config.shape, tie_embeddings=True)  # the head is lm_head
        self.core: Decoder | Encoder = Decoder(shape) if config.causal else Encoder(shape)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.core.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.core.embedding = value
        self.core.config = dataclasses.replace(self.core.config, vocab_size=value.num_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ZonalCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens.

        Args:
            input_ids: (B, T). Or ``inputs_embeds``: (B, T, dim).
            attention_mask: (B, T), nonzero for a real token, or (B, S) with the S − T tokens of the cache before it.
            position_ids: (B, T). Documents are packed into a row where positions start again from 0: no token sees
                another document. Other positions are those of the tokens, and need not be given.
            past_key_values: a ``ZonalCache``, changed in place; an empty cache of transformers is replaced by one. It
                can be given as ``cache``, too, its name since transformers 5.24.
            use_cache: return a cache.
            output_hidden_states: return the embedding, the output of each block but the last, and the last hidden
                state.

        Raises: ArgumentError for tokens, a mask, cache or positions that do not fit, for ``output_attentions``, and for
            arguments of other models.
        """
        _check_others(others, position_ids)
        if (input_ids is None) == (inputs_embeds is None):
            raise ArgumentError("ZonalModel: one of input_ids and inputs_embeds is required.")
        self._refuse_weights(output_attentions)
        if (named := others.get("cache")) is not None:
            if past_key_values is not None:
                raise ArgumentError("ZonalModel: cache and past_key_values are two names of one argument. Give one.")
            past_key_values = named
        x = self.core._embed(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[arg-type]
        self._check_offloaded(x)
        cache = self._cache(past_key_values, use_cache)
        real = self._real(attention_mask, x, 0 if cache is None else cache.get_seq_length())
        offsets = document_offsets(position_ids, x, real)
        if offsets is not None and past_key_values is not None:
            raise ArgumentError(
                "ZonalModel: packed documents (position_ids that start again from 0) begin afresh and take no cache. "
                "Leave the cache out."
            )
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        inputs: list[Tensor] | None = [] if wanted else None
        if offsets is not None:
            cache = None
            passed = self.core._run_blocks(x.flatten(0, 1)[None], cu_seqlens=offsets, inputs=inputs)
        elif cache is None:
            passed = self.core._run_blocks(x, key_padding_mask=real, inputs=inputs)
        else:
            assert isinstance(self.core, Decoder)
            pasts, read, real = cache.begin(self.core, x, real)
            passed = self.core._run_blocks(read, pasts, key_padding_mask=real, report=cache.report, inputs=inputs)
            cache.end(passed.pasts, passed.readings)
        states = [*(inputs or ()), self.core.norm(passed.hidden)]
        if offsets is not None:
            states = [state.view_as(x) for state in states]
        elif cache is not None:  # without the tokens that were read again
            states = [state[:, -x.shape[1] :] for state in states]
        # by position here and below: the cache's name is that of the version of transformers
        return BaseModelOutputWithPast(states[-1], cache, tuple(states) if wanted else None)

    def _check_offloaded(self, x: Tensor) -> None:
        """Raise ArgumentError for weights that accelerate brings only while the module that holds them is called:
        operators and recurrences read theirs from outside, and would read what is not there.
        """
        hooked = any(hasattr(block, "_hf_hook") for block in self.core.blocks.children())
        if hooked and not x.is_meta and any(weight.is_meta for weight in self.core.blocks.parameters()):
            raise ArgumentError(
                "ZonalModel: some blocks are offloaded to the disk or the CPU by device_map, which layers of this "
                "library cannot read. Load the model with a device_map without offloading, such as {'': 'cpu'}, or in "
                "dtype=torch.bfloat16, which takes half the memory."
            )

    def _cache(self, given: Cache | None, use_cache: bool | None) -> ZonalCache | None:
        """The cache to read after and to fill, or None."""
        if isinstance(given, ZonalCache):
            if not self.config.causal:
                raise ArgumentError(
                    "ZonalModel: an encoder (causal=False) reads each text at once and keeps no cache. Leave it out."
                )
            return given
        if isinstance(given, OperatorCache) or (given is not None and given.get_seq_length()):
            raise ArgumentError(
                f"ZonalModel: the cache must be a ZonalCache of this model, received a {type(given).__name__} of "
                f"{given.get_seq_length()} tokens. Leave it out, or read the tokens again."
            )
        asked = use_cache or given is not None  # by the call; in training the config alone makes no cache
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if not use_cache or not self.config.causal or (self.gradient_checkpointing and self.training):
            return None
        return ZonalCache() if asked or not self.training else None

    def _real(self, mask: Tensor | None, x: Tensor, seen: int) -> Tensor | None:
        """Which of the tokens x are real, bool (B, T), or None if all are."""
        if mask is None:
            return None
        batch, length = x.shape[:2]
        if mask.shape not in ((batch, length), (batch, seen + length)):
            raise ArgumentError(
                f"ZonalModel: attention_mask must be (batch, tokens) = {(batch, length)}"
                f"{f' or, with the {seen} tokens of the cache, {(batch, seen + length)}' if seen else ''}, nonzero for "
                f"a real token, received {tuple(mask.shape)}. Operators apply causality and windows themselves."
            )
        real = mask[:, -length:].bool()
        # reading ``all`` would break a traced graph, which therefore always takes the mask
        return real if torch.compiler.is_compiling() or not bool(real.all()) else None


class ZonalLanguageModel(ZonalPreTrainedModel):
    """A model with an output layer over the vocabulary, which may be the embedding.

    causal: what ``config.causal`` has to be.
    """

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.core.embedding.weight"}
    causal: ClassVar[bool]

    def __init__(self, config: ZonalConfig) -> None:
        super().__init__(config)
        if config.causal is not self.causal:
            raise ArgumentError(
                f"{type(self).__name__}: a config with causal={self.causal} is required, received {config.causal}. A "
                "decoder is a ZonalForCausalLM, an encoder a ZonalForMaskedLM."
            )
        self.model = ZonalModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class ZonalForCausalLM(ZonalLanguageModel, GenerationMixin):
    """A language model of any operators: ``AutoModelForCausalLM``.

    ``generate`` keeps a ``ZonalCache``: constant in size where the operators' memories are. Beams, assisted generation
    and batches of unequal prompts, padded on the left, work as with other models.
    """

    causal = True

    @classmethod
    def of(cls, model: CausalLM, options: Mapping[str, Any] | None = None) -> "ZonalForCausalLM":
        """A model of this library with its weights, which are copied. options: arguments of ``ZonalConfig``."""
        made = cls(ZonalConfig.of(model.config, options))
        weights = {f"model.core.{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
        _fill(made, {**weights, "lm_head.weight": model._head_weight()})
        return made

    def native(self) -> CausalLM:
        """The model of this library with these weights, which are copied."""
        model = CausalLM(self.config.shape)
        weights = dict(self.model.core.state_dict())
        if model.head is not None:
            weights["head.weight"] = self.lm_head.weight.detach()
        _fill(model, weights)
        return model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ZonalCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """As ``ZonalModel``, and these:

        Args:
            labels: (B, T), the tokens themselves, −100 where no prediction counts. The loss is of the next token.
            logits_to_keep: only the logits of the last tokens, or of these positions. 0: of all.
            shift_labels: (B, T), the label of each position, in place of ``labels``.
        """
        shift_labels = others.get("shift_labels")  # unnamed above, or Trainer would evaluate no rows without it
        if labels is not None and shift_labels is None and active() is not None:
            raise ArgumentError(
                "ZonalForCausalLM: within sequence_parallel the label of a stretch's last token is on the next rank. "
                "Shift the labels of the whole sequence, and pass this rank's part as shift_labels."
            )
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **others
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **others)
        return CausalLMOutputWithPast(loss, logits, getattr(outputs, CACHE), outputs.hidden_states)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: GenerationMode, *inputs: Any, **others: Any
    ) -> None:
        """``generate`` starts with this cache, and not with the one that it has for keys and values."""
        start_generation("ZonalForCausalLM", ZonalCache, generation_config, model_kwargs, mode)

    def init_continuous_batching(self, *inputs: Any, **others: Any) -> Any:
        """Raises ArgumentError: continuous batching (``generate_batch``) is for keys and values in pages."""
        raise ArgumentError(
            "ZonalForCausalLM: continuous batching (generate_batch) keeps keys and values in pages, and this model has "
            "memories. Call generate with a batch of prompts, padded on the left."
        )


def _fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model, each with its type: operators stay in float32 in a model of bfloat16."""
    for name, value in model.state_dict(keep_vars=True).items():
        value.data = value.data.to(weights[name].dtype)
    model.load_state_dict(weights)


class ZonalForMaskedLM(ZonalLanguageModel):
    """An encoder of text that predicts masked tokens: ``AutoModelForMaskedLM``. Its config has ``causal=False``."""

    causal = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> MaskedLMOutput:
        """As ``ZonalModel``. labels: (B, T), the token at each place, −100 where no prediction counts."""
        outputs = self.model(input_ids, attention_mask, position_ids, None, inputs_embeds, **others)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **others)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class ZonalForSequenceClassification(ZonalPreTrainedModel):
    """A decoder or encoder with a linear layer on one vector per text: ``AutoModelForSequenceClassification``.

    The vector is that of the last real token of a decoder, and the mean over the real tokens of an encoder.
    """

    accepts_loss_kwargs = False  # the loss is a mean over the batch, which Trainer then averages over batches

    def __init__(self, config: ZonalConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.model = ZonalModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ZonalCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> SequenceClassifierOutputWithPast:
        """As ``ZonalModel``. Without an attention_mask, tokens that are ``config.pad_token_id`` are padding.

        labels: (B,) classes, or numbers for a regression; ``config.problem_type`` as in transformers.
        """
        if active() is not None:
            raise ArgumentError(
                "ZonalForSequenceClassification: a class is read from the whole text, which sequence_parallel splits "
                "over ranks. Call the model outside of its with block."
            )
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = input_ids != self.config.pad_token_id
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **others
        )
        hidden = outputs.last_hidden_state
        batch, length = hidden.shape[:2]
        real = hidden.new_ones(batch, length, dtype=torch.bool)
        if attention_mask is not None:
            real = attention_mask[:, -length:].bool()
        if self.config.causal:
            last = (torch.arange(length, device=hidden.device) * real).argmax(1)
            pooled = hidden[torch.arange(batch, device=hidden.device), last]
        else:
            pooled = torch.where(real[..., None], hidden, 0).sum(1) / real.sum(1, keepdim=True).clamp_min(1)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, logits=logits[:, None], pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss, logits, getattr(outputs, CACHE), outputs.hidden_states)


class ZonalForImageClassification(ZonalPreTrainedModel):
    """The vision transformer ``zonal.models.VisionEncoder``: ``AutoModelForImageClassification``."""

    config_class = ZonalVisionConfig
    config: ZonalVisionConfig  # type: ignore[assignment]
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # as of ZonalForSequenceClassification

    def __init__(self, config: ZonalVisionConfig) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.model = ImageClassifier(config.shape)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.patches

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> ImageClassifierOutput:
        """Images (B, channels, image, image) -> logits (B, classes).

        labels: (B,) classes, or numbers for a regression; ``config.problem_type`` as in transformers.
        output_hidden_states: return the input of each block, before tokens are merged for it, and the last hidden
            state, each (B, tokens, dim).

        Raises: ArgumentError for images of another size, and for ``output_attentions``.
        """
        self._refuse_weights(output_attentions)
        states = self.model.encoder.states(self.model.tokens(pixel_values.to(self.dtype)))
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        kept = deque(states, maxlen=None if wanted else 1)
        logits = self.model.head(kept[-1].pooled())
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=self.config)
        hidden = tuple(state.x for state in kept) if wanted else None
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)


__all__ = [
    "ZonalForCausalLM",
    "ZonalForImageClassification",
    "ZonalForMaskedLM",
    "ZonalForSequenceClassification",
    "ZonalLanguageModel",
    "ZonalModel",
    "ZonalPreTrainedModel",
]
