"""What Trainer, peft and the models of transformers themselves expect: configs that can be changed, labels that are
shifted, tied tokens, and decoders whose tokens see all.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForQuestionAnswering,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    FalconH1Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from zonal import hf
from zonal.errors import ArgumentError
from zonal.hf.distil import Transfer
from zonal.hf.layers import window_of
from zonal.models import ModelConfig


def test_a_config_is_the_shape_and_can_be_changed(tmp_path: Any) -> None:
    """Its fields are attributes and can be replaced when it is read, as those of transformers' own configs."""
    given = {"vocab_size": 61, "dim": 32, "layers": "sko", "heads": 4}
    config = hf.ZonalConfig(**given)
    assert config.shape == ModelConfig(**given)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).shape == config.shape
    changes = {"dim": 64, "heads": 8, "layers": "softmax*3", "rotary": True, "vocab_size": 99}
    assert AutoConfig.from_pretrained(tmp_path, **changes).shape == ModelConfig(**changes)
    config.rotary = True
    config.rotary_base = 5e5
    assert (config.shape.rotary_base, config.rotary_base) == (5e5, 5e5)
    with pytest.raises(ArgumentError, match="num_hidden_layers is read from the shape, and the argument is called lay"):
        AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    with pytest.raises(AttributeError, match="ZonalConfig has no attribute 'depth'"):
        _ = config.depth
    image = hf.ZonalVisionConfig(image=8, channels=1, layers="sko")
    image.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, layers="sko*2", num_labels=3).shape == dataclasses.replace(
        image.shape, layers=("sko", "sko"), classes=3
    )


def test_labels_are_shifted_before_they_are_smoothed(tmp_path: Any) -> None:
    torch.manual_seed(0)
    made = hf.ZonalForCausalLM(hf.ZonalConfig(vocab_size=31, dim=16, layers="softmax", heads=2))
    tokens = torch.randint(31, (2, 9))
    trainer = Trainer(made, TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[]))
    found = trainer.compute_loss(made, {"input_ids": tokens, "labels": tokens})
    logits = made(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found.to(expected), expected)


def test_a_merged_adapter_of_tied_tokens_gives_the_same_logits() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    made = hf.ZonalForCausalLM(hf.ZonalConfig(vocab_size=31, dim=16, layers="softmax", heads=2)).eval()
    lora = peft.LoraConfig(target_modules=["query"], trainable_token_indices=[3, 4], task_type="CAUSAL_LM")
    adapted, tokens = peft.get_peft_model(made, lora).eval(), torch.tensor([[3, 9, 4, 1]])
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        before = adapted(input_ids=tokens).logits
        torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, before, atol=1e-5, rtol=1e-5)


SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("where", ["config", "call"])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_decoder_whose_tokens_see_all(kind: Any, where: str) -> None:
    """``is_causal=False``, which transformers takes in a config and in a call."""
    torch.manual_seed(0)
    tokens, mask = torch.randint(2, 61, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    config = kind(**SMALL, **({"is_causal": False} if where == "config" else {}))
    made = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    call: dict[str, Any] = {"use_cache": False, **({"is_causal": False} if where == "call" else {})}
    with torch.no_grad():
        before = [made(tokens, **call)[0], made(tokens, attention_mask=mask, **call)[0][mask.bool()]]
        if where == "config":
            with pytest.raises(ArgumentError, match="cache='memory' is for decoders"):
                hf.convert(made, cache="memory")
        hf.convert(made)
        after = [made(tokens, **call)[0], made(tokens, attention_mask=mask, **call)[0][mask.bool()]]
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_a_window_of_such_a_decoder_is_refused() -> None:
    words, tokens = "has a sliding window of 4 tokens and is asked that each token sees all", torch.tensor([[3, 4, 5]])
    with pytest.raises(ArgumentError, match=words):
        hf.convert(AutoModel.from_config(MistralConfig(**SMALL, sliding_window=4, is_causal=False)))
    made = AutoModel.from_config(MistralConfig(**SMALL, sliding_window=4))
    hf.convert(made)
    with pytest.raises(ArgumentError, match=words):
        made(tokens, use_cache=False, is_causal=False)
    hf.register()
    config = MistralConfig(**SMALL, sliding_window=4, is_causal=False)
    with pytest.raises(ArgumentError, match=words):
        AutoModel.from_config(config, attn_implementation="zonal:softmax")(tokens, use_cache=False)


def test_a_memory_keeps_earlier_tokens_only() -> None:
    torch.manual_seed(0)
    made = AutoModel.from_config(LlamaConfig(**SMALL)).eval()
    hf.convert(made, cache="memory")
    with pytest.raises(ArgumentError, match="has a MemoryCache, which keeps earlier tokens"):
        made(torch.tensor([[3, 4, 5]]), **{hf.CACHE: hf.MemoryCache()}, use_cache=True, is_causal=False)


def test_an_attention_by_name_whose_tokens_see_all() -> None:
    hf.register()
    tokens, found = torch.arange(2, 11)[None], []
    for name in ("zonal:softmax", "eager"):
        torch.manual_seed(0)
        made = AutoModel.from_config(LlamaConfig(**SMALL, is_causal=False), attn_implementation=name).eval()
        with torch.no_grad():
            found.append(made(tokens, use_cache=False)[0])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_what_a_model_does_not_do_is_not_converted() -> None:
    """Falcon-H1 has a recurrence beside the attention of each layer; Moshi's layers use no window of its config."""
    with pytest.raises(ArgumentError, match="received layers of the kinds hybrid of FalconH1Attention"):
        hf.convert(
            AutoModel.from_config(
                FalconH1Config(**SMALL, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
            ),
            cache="memory",
        )
    layer = SimpleNamespace(config=MistralConfig(**SMALL, sliding_window=4), layer_idx=0)
    assert window_of(layer) == 4
    layer.config.model_type = "moshi"
    assert window_of(layer) is None


def test_layers_whose_causality_stands_elsewhere_are_refused() -> None:
    """In the call of CLIP's text encoder, in the mask of BigBird-Pegasus' decoder: both gave encoders."""
    encoder = CLIPTextModel(
        CLIPTextConfig(vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    ).eval()
    hf.convert(encoder)
    with pytest.raises(ArgumentError, match=r"asks in the call that it sees earlier ones only \(is_causal=True\)"):
        encoder(torch.arange(6)[None])
    decoder = BigBirdPegasusForCausalLM(
        BigBirdPegasusConfig(
            vocab_size=19, d_model=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=24,
            encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=24, is_decoder=True,
        )
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="has causal layers and others"):
        hf.convert(decoder)


def test_transfer_measures_what_the_converted_model_computes() -> None:
    """OPT scales its queries itself. An operator that is softmax has nothing to learn."""
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=17, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, word_embed_proj_dim=16,
        )
    ).eval()  # fmt: skip
    hf.convert(model, "softmax")
    assert max(Transfer(model).losses(torch.arange(12)[None])["layers"]) < 1e-10


ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "config", "auto", "given"),
    [
        (BertForQuestionAnswering, BertConfig(**ENCODER), AutoModelForQuestionAnswering, torch.arange(6)[None]),
        (
            ViTForImageClassification, ViTConfig(image_size=8, patch_size=4, **ENCODER),
            AutoModelForImageClassification, torch.ones(1, 3, 8, 8),
        ),
    ],
)  # fmt: skip
@torch.no_grad()
def test_converted_models_of_every_auto_class_are_read(
    kind: Any, config: Any, auto: Any, given: torch.Tensor, tmp_path: Any
) -> None:
    """They were converted and saved, and could not be read again."""
    model = kind(config).eval()
    hf.convert(model, "squared_affine")
    model.save_pretrained(tmp_path)
    for again in (auto.from_pretrained(tmp_path), hf.from_pretrained(tmp_path)):
        assert type(again).__name__ == type(model).__name__
        assert torch.equal(again(given)[0], model(given)[0])


@torch.no_grad()
def test_a_converted_part_is_read_with_a_model_that_asks_for_its_type(tmp_path: Any) -> None:
    image = CLIPVisionConfig(image_size=8, patch_size=4, **ENCODER)
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**SMALL), vision_config=image, image_token_index=60)
    ).eval()
    hf.convert(model.model.language_model, "squared_affine")
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_an_encoder_that_was_converted_alone_works_alone() -> None:
    """Bart's decoder has the same config, which says how both compute attention."""
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=19, d_model=16, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=24,
            encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=24, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    tokens = torch.arange(1, 7)[None]
    before = model.get_encoder()(tokens)[0]
    hf.convert(model.get_encoder(), "softmax")
    assert torch.allclose(model.get_encoder()(tokens)[0], before, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"has no operator.*converted alone works alone where it shares its config"):
        model(tokens)
