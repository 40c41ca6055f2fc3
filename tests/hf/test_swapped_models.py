"""Models of transformers on operators: the same logits, caches, padding, windows and gradients, and calls of a small
model.
"""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from small_llama import SIZES, decoder
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zonal
from zonal import Operator, hf
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.hf import attending
from zonal.nn import rewa


class Config(PreTrainedConfig):
    model_type = "stand_in"
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    sliding_window: int | None = None


class Layer(nn.Module):
    """Attention as transformers' models have it: grouped heads, a cache, and the registered function."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.is_causal, self.head_dim, self.scaling = True, 6, 0.3
        self.maps = nn.ModuleList([nn.Linear(24, size, bias=False) for size in (24, 12, 12)])

    def forward(self, x: Tensor, mask: Tensor | None, **others: Any) -> Tensor:
        q, k, v = (linear(x).unflatten(2, (-1, 6)).transpose(1, 2) for linear in self.maps)
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return function(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **others)[0].flatten(2)


class Model(PreTrainedModel):
    config_class = Config
    _supports_sdpa = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask, **others)
        return x


def made(**config: Any) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(Config(**config)), torch.randn(2, 9, 24)


def reference(model: Model, x: Tensor, mask: Tensor | None = None, left: int | None = None) -> Tensor:
    operator = m.softmax(prior=() if left is None else zonal.prior.Window(left=left))
    for layer in model.layers:
        q, k, v = (linear(x).unflatten(2, (-1, 6)).transpose(1, 2) for linear in layer.maps)  # type: ignore[union-attr]
        y = zonal.attention(
            q.double(), k.double(), v.double(), operator, causal=True, scale=0.3, key_padding_mask=mask, path="dense"
        )
        x = x + y.float().transpose(1, 2).flatten(2)
    return x


def test_every_layer_gets_its_operator() -> None:
    model, x = made()
    found = hf.convert(model)
    assert [operator is layer.operator for operator, layer in zip(found, model.layers, strict=True)] == [True, True]
    assert hf.operators(model) == found
    assert found[0].learned_parts["score_gate"].shape == (4, 3)
    assert torch.allclose(model(x), reference(model, x), atol=1e-5)
    model(x).square().sum().backward()
    assert all(operator.learned_parts["score_gate"].grad is not None for operator in found)
    with torch.no_grad():
        found[1].learned_parts["score_gate"].fill_(1.0)
    assert not torch.allclose(model(x), reference(model, x), atol=1e-3)
    # again, with another: by a spec, whose open scale is the layer's
    hf.convert(model, "softmax")
    assert torch.allclose(model(x), reference(model, x), atol=1e-5)
    hf.convert(model, m.cosine(temperature=0.2))
    assert hf.operators(model)[0].learned_parts["score_log_temperature"].shape == (4,)
    assert not torch.allclose(model(x), reference(model, x), atol=1e-3)


def test_padding_and_windows() -> None:
    model, x = made(sliding_window=4)
    hf.convert(model)
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    mask = mask_of(9, 9, attention_mask=real)
    wanted = reference(model, x, real, left=3)
    assert torch.allclose(model(x, mask, sliding_window=4)[real], wanted[real], atol=1e-5)
    # what a window's cache holds: the last keys, and the mask of those
    assert mask_of(1, 4, q_offset=8, kv_offset=5, attention_mask=real) is None
    cut = mask_of(1, 7, q_offset=8, kv_offset=2, attention_mask=real)
    assert torch.equal(cut[:, 0, 0], real[:, 2:])
    assert mask_of(9, 9) is None
    assert mask_of(9, 9, allow_is_causal_skip=False) is None  # a causal mask that is not to be left out
    for wrong in ({"use_vmap": True}, {"attention_mask": real}, {"kv_length": 32}):
        with pytest.raises(ArgumentError, match="received a mask function or a static cache"):
            mask_of(**{"q_length": 9, "kv_length": 9, "allow_is_causal_skip": False} | wrong)
    with pytest.raises(ArgumentError, match="some tokens see later ones"):
        mask_of(9, 9, allow_is_causal_skip=False, mask_function=masking_utils.bidirectional_mask_function)


def mask_of(q_length: int, kv_length: int, **others: Any) -> Any:
    """The mask that transformers would ask for, for two rows."""
    usual = {
        "batch_size": 2, "device": torch.device("cpu"), "allow_is_causal_skip": True,
        "mask_function": masking_utils.causal_mask_function,
    }  # fmt: skip
    return attending.padding(q_length, kv_length, **usual | others)


# the needs that layers of transformers do not meet, by mechanism; all others are converted
REFUSED = {
    "sinkhorn": "a bidirectional layer", "hyperbolic_transport": "a bidirectional layer",
    "hierarchical": "a bidirectional layer",
    "rewa_categorical": "one map that makes both queries and keys",
    "rewa_categorical(transport=True)": "one map that makes both queries and keys",
    "rewa(shared_witness=True)": "one map that makes both queries and keys",
    "rewa_topological": "4 deaths of its neighbourhood behind each query and key",
    "ska(fading=True)": "a decay that each token sets", "ridge(fading=True)": "a decay that each token sets",
    "rewa(parts=(1, 1, 1), adaptive=True)": "logits of its own weights",
    "rewa_operator": "other queries and keys than those of 6 numbers per head",
    "rewa(parts=(2, 2, 4))": "queries and keys of 8 numbers per head, and these layers have 6",
}  # fmt: skip
LIST = sorted({*m.names(), *REFUSED, "ska(power=1)"})


@pytest.mark.parametrize("spec", LIST)
def test_a_converted_layer_is_that_of_nn_attention_or_refused(spec: str) -> None:
    model, x = made()
    layer = model.layers[0]
    layer.scaling = 6**-0.5  # what ``nn.Attention`` gives an open scale
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if spec in REFUSED:
        with pytest.raises(
            ArgumentError,
            match=rf"hf.convert: operator '{spec.split('(')[0]}' needs {re.escape(REFUSED[spec])}",
        ):
            hf.convert(model, spec)
        assert model.config._attn_implementation == "sdpa"
        assert model.state_dict().keys() == before.keys()
        return
    hf.convert(model, spec)
    wanted = zonal.nn.Attention(24, 4, spec, kv_heads=2)
    wanted.load_state_dict(
        {f"{name}.weight": linear.weight for name,
        linear in zip(("query", "key", "value"), layer.maps, strict=True)}  # type: ignore[arg-type]
        | {name: value for name,
        value in layer.state_dict().items() if not name.startswith("maps")} | {"output.weight": torch.eye(24)}
    )  # fmt: skip
    if wanted.readout is not None:
        for norm in (wanted.readout, layer.readout):
            torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(3))  # type: ignore[union-attr]
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    for mask in (None, real):
        found, expected = layer(x, mask), wanted(x, key_padding_mask=mask)
        assert expected.abs().max() > 1e-3
        assert torch.allclose(found[real], expected[real], rtol=1e-4, atol=1e-5)


def test_each_layer_draws_features_of_its_own() -> None:
    drawn = [[dict(own.fixed_parts.named_buffers()) for own in hf.convert(made()[0], "performer")] for _ in range(2)]
    (first, second), again = drawn
    assert first
    for name, value in first.items():
        assert not torch.equal(value, second[name])
        assert torch.equal(value, again[0][name])


def test_a_norm_over_all_heads_is_provided() -> None:
    model, x = made()
    layer = model.layers[0]
    plain = m.softmax()
    hf.convert(model, plain)
    y = layer(x, None)
    hf.convert(model, Operator(plain.score, plain.link, plain.anchor, readout="concat"))
    assert torch.allclose(layer(x, None), torch.nn.functional.rms_norm(y, (24,), eps=1e-6), atol=1e-5)
    hf.convert(model, plain)
    assert torch.equal(layer(x, None), y)
    assert not any("readout" in name for name in model.state_dict())


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made()
    with pytest.raises(ArgumentError, match=r"a converted model is required, received Model. Call hf.convert"):
        hf.operators(model)
    with pytest.raises(ArgumentError, match="layers of self-attention is required, received str"):
        hf.convert("SmolLM2-135M")
    with pytest.raises(ArgumentError, match="layers of self-attention is required, received Linear"):
        hf.convert(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="Layer has no operator"):
        attending.attend(model.layers[0], x, x, x, None)
    hf.convert(model)
    for given, words in (
        ({"softcap": 30.0}, "asks for softcap"), ({"s_aux": x}, "asks for s_aux"),
        ({"output_attentions": True}, "asks for output_attentions"),
        ({"sliding_window": 4}, "keeps 4 tokens, and its operator has no such Window"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            model(x, **given)
    q, k, v = torch.randn(3, 2, 4, 9, 6).unbind(0)
    halved = attending.attend(model.layers[0], q, k[:, :2], v[:, :2], None, scaling=0.15)[0]
    assert torch.equal(halved, attending.attend(model.layers[0], q / 2, k[:, :2], v[:, :2], None, scaling=0.3)[0])
    four = torch.ones(2, 1, 9, 9)
    with pytest.raises(
        ArgumentError,
        match=r"a mask \(batch, tokens\), nonzero = a real token, is required, received shape \(2, 1, 9, 9\)",
    ):
        model(x, four)
    stubborn, _ = made()
    monkeypatch.setattr(stubborn, "set_attn_implementation", lambda name: None)
    with pytest.raises(ArgumentError, match="has an attention of its own"):
        hf.convert(stubborn)
    assert not hasattr(stubborn.layers[0], "operator")


THEIRS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"head_dim": 12},
    "Mistral": SIZES | {"sliding_window": 5},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
             "resid_pdrop": 0.0, "initializer_range": 0.3},
}  # fmt: skip


def their(kind: str) -> Any:
    return decoder(kind, **THEIRS[kind])


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GPT2"])
def test_transformers_models_say_the_same(kind: str) -> None:
    model = their(kind)
    converted = copy.deepcopy(model)
    hf.convert(converted)
    tokens = torch.randint(1, 29, (2, 17), generator=torch.Generator().manual_seed(1))
    expected, logits = model(tokens).logits, converted(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    # padding on the left; what is said at padded positions is of no account
    real = torch.arange(17) >= torch.tensor([[0], [6]])
    expected, logits = (x(tokens, attention_mask=real.long()).logits[real] for x in (model, converted))
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    # gradients of the weights they share
    for x in (model, converted):
        x.zero_grad()
        x(tokens, labels=tokens).loss.backward()
    theirs = dict(model.named_parameters())
    for name, value in converted.named_parameters():
        if name in theirs:
            wanted = theirs[name].grad
            assert (value.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-7, name
        else:
            assert "operator.learned_parts" in name
    # the cache, many tokens at once and one at a time
    arguments = {"attention_mask": real.long(), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(converted.generate(tokens, **arguments), model.generate(tokens, **arguments))
    # open gates say something else
    with torch.no_grad():
        for operator in hf.operators(converted):
            operator.learned_parts["score_gate"].fill_(1.0)
    assert (converted(tokens).logits - model(tokens).logits).abs().max() > 1e-2
    if kind == "Llama":
        with pytest.raises(ArgumentError, match="static cache"):
            converted.generate(tokens, max_new_tokens=3, cache_implementation="static", do_sample=False)


def learned_away(model: Any, operator: Any) -> Any:
    """The model converted, what its operators and norms learn away from where it starts."""
    generator = torch.Generator().manual_seed(2)
    hf.convert(model, operator)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".operator." in name or ".readout." in name:
                value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    return model


def test_a_converted_model_and_its_config_are_pickled(tmp_path: Any) -> None:
    model = learned_away(their("Llama"), "sko")
    tokens = torch.randint(1, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    torch.save(model, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert type(again) is type(model)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    config = pickle.loads(pickle.dumps(model.config))
    assert type(config) is type(model.config)
    assert config.to_dict() == model.config.to_dict()


@torch.no_grad()
def test_an_offloaded_operator_is_refused(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    learned_away(their("Llama"), "sko").save_pretrained(tmp_path / "model")
    places: dict[str, Any] = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb", "layers.0")}
    places |= {"lm_head": "cpu", "model.layers.1": "disk"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    with pytest.raises(ArgumentError, match="operator of LlamaAttention is offloaded"):
        loaded(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("operator", [None, "sko", "performer", "ska(power=1)", "rewa_riemannian", "retention"])
def test_a_saved_model_comes_back_to_the_bit_or_not_at_all(
    operator: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = learned_away(their("Llama"), operator or rewa.with_closed_gates)
    tokens = torch.randint(1, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    model.save_pretrained(tmp_path / "first")
    again = hf.from_pretrained(tmp_path / "first")
    for folder in ("second", "third"):  # and once more, from what was loaded
        assert type(again) is type(model)
        assert not again.training
        assert torch.equal(again(tokens).logits, logits)
        theirs = dict(again.named_parameters()) | dict(again.named_buffers())
        assert all(
            torch.equal(theirs[name], value) and theirs[name].dtype == value.dtype
            for name, value in model.state_dict().items()
        )
        again.save_pretrained(tmp_path / folder)
        again = hf.from_pretrained(tmp_path / folder)
    # the Auto classes know it; transformers alone does not
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert type(auto) is type(model)
    assert isinstance(auto, transformers.LlamaForCausalLM)
    assert torch.equal(auto(tokens).logits, logits)
    assert torch.equal(transformers.AutoModel.from_pretrained(tmp_path / "first")(tokens)[0], auto.model(tokens)[0])
    monkeypatch.delitem(transformers.CONFIG_MAPPING._extra_content, "zonal_converted")
    with pytest.raises(ValueError, match="model type `zonal_converted`"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")


@pytest.mark.parametrize("operator", ["retention", "local_global"])
def test_an_encoder_takes_no_operator_in_which_time_runs_forward(operator: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=29, **sizes))
    before = model.config._attn_implementation
    with pytest.raises(ArgumentError, match=rf"hf\.convert: operator '{operator}' needs a causal layer"):
        hf.convert(model, operator)
    assert model.config._attn_implementation == before


def test_a_model_whose_config_other_auto_classes_name_comes_back(tmp_path: Any) -> None:
    """In transformers 5 a class for decisions stands for Qwen2's config, and reads another."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=29, num_key_value_heads=2, **sizes)
    ).eval()
    hf.convert(model, "sko")
    tokens = torch.randint(1, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    model.save_pretrained(tmp_path)
    for load in (transformers.AutoModelForCausalLM.from_pretrained, hf.from_pretrained):
        assert torch.equal(load(tmp_path)(tokens).logits, logits)


def test_a_saved_model_in_bfloat16_keeps_its_operators_in_float32(tmp_path: Any) -> None:
    model = their("Llama")
    for value in model.parameters():  # and no buffer: rotary frequencies are in float32 for whoever loads
        value.data = value.data.bfloat16()
    learned_away(model, rewa.with_closed_gates)
    tokens = torch.randint(1, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    again = hf.from_pretrained(tmp_path)
    assert next(again.parameters()).dtype == torch.bfloat16
    assert hf.operators(again)[0].learned_parts["score_gate"].dtype == torch.float32
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_what_was_not_saved_by_a_converted_model(tmp_path: Any) -> None:
    their("Llama").save_pretrained(tmp_path)
    with pytest.raises(
        ArgumentError,
        match=r"from_pretrained: a model that was converted and saved is required; the config of .* holds no operators",
    ):
        hf.from_pretrained(tmp_path)


def test_a_converted_model_trains_in_bfloat16(tmp_path: Any) -> None:
    """Under autocast queries and keys come in float32, turned by rotary positions, and values in bfloat16."""
    model = their("Llama")
    hf.convert(model, "sko")
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(1, 29, (4, 7), generator=torch.Generator().manual_seed(1))
    ]
    settings = transformers.TrainingArguments(
        str(tmp_path),
        bf16=True,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    before = {name: value.clone() for name, value in model.named_parameters()}
    found = transformers.Trainer(model, settings, train_dataset=rows).train()  # type: ignore[arg-type]
    assert 0 < found.training_loss < 10
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in model.parameters())
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert all(any(part in name for name in moved) for part in (".operator.", ".readout.", "q_proj"))


@pytest.mark.parametrize("operator", [rewa.with_closed_gates, "sko", "ska(power=1)"])
def test_an_adapter_trains_and_saves_the_operators_it_names(operator: Any, tmp_path: Any) -> None:
    """peft freezes and leaves out what an operator learns, unless ``modules_to_save`` names it."""
    peft = pytest.importorskip("peft")
    tokens = torch.randint(1, 29, (2, 7), generator=torch.Generator().manual_seed(1))
    maps = ["q_proj", "v_proj"]

    def adapted(**settings: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=maps, task_type="CAUSAL_LM", **settings)
        return peft.get_peft_model(learned_away(their("Llama"), operator), config)

    def logits_of(model: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens).logits

    def trainable(model: Any) -> set[str]:
        return {name for name, value in model.named_parameters() if value.requires_grad and "lora_" not in name}

    frozen = adapted()
    assert not trainable(frozen)
    assert all(value.requires_grad for name, value in frozen.named_parameters() if "lora_" in name)
    for each in hf.operators(frozen):
        each.requires_grad_(True)
    frozen.save_pretrained(tmp_path / "alone")
    assert all("lora_" in name for name in load_file(tmp_path / "alone" / "adapter_model.safetensors"))

    plain = learned_away(their("Llama"), operator)
    own = {name for name, _ in plain.named_parameters() if ".operator." in name or ".readout." in name}
    assert own
    model = adapted(modules_to_save=["operator", "readout"])
    named = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", "") for name in trainable(model)
    }
    assert named == own
    expected = logits_of(plain)
    assert torch.equal(logits_of(model), expected)

    before = {name: value.clone() for name, value in model.named_parameters() if value.requires_grad}
    descent = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    for _ in range(2):  # the second factor of an adapter starts at zero
        descent.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        descent.step()
    assert [
        name for name, value in model.named_parameters() if name in before and torch.equal(value, before[name])
    ] == []
    logits = logits_of(model)
    assert (logits - expected).abs().max() > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits_of(model), expected)

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(learned_away(their("Llama"), operator), tmp_path / "adapter")
    assert torch.equal(logits_of(again), logits)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    found = logits_of(hf.from_pretrained(tmp_path / "merged"))
    assert torch.equal(found, logits_of(merged))
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()


@torch.no_grad()
def test_mechanisms_are_attention_implementations_by_name() -> None:
    names = hf.register()
    assert {"zonal:softmax", "zonal:squared_affine"} <= set(names)
    model, tokens = their("Llama"), torch.randint(1, 29, (2, 11), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens).logits
    found: Any = transformers.LlamaForCausalLM._from_config(model.config, attn_implementation="zonal:softmax").eval()
    found.load_state_dict(model.state_dict())
    assert (found(tokens).logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    other = copy.deepcopy(model)
    hf.convert(other, "squared_affine")
    model.set_attn_implementation("zonal:squared_affine")
    assert torch.equal(model(tokens).logits, other(tokens).logits)
    real = torch.arange(11) >= torch.tensor([[0], [4]])
    arguments: dict[str, Any] = {"attention_mask": real.long(), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(tokens, **arguments), other.generate(tokens, **arguments))
    for name, words in (("sko", "a norm"), ("performer", "to be sized"), ("sinkhorn", "a bidirectional layer")):
        model.set_attn_implementation(f"zonal:{name}")
        with pytest.raises(
            ArgumentError, match=rf"zonal:{name}: the operator needs {words}.*zonal.hf.convert\(model, '{name}'"
        ):
            model(tokens)
    windowed, plain = their("Mistral"), their("Mistral")
    windowed.set_attn_implementation("zonal:softmax")
    expected = plain(tokens).logits
    assert (windowed(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
