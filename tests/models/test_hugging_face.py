"""Models of transformers on operators: the same logits, caches, padding, windows and gradients where transformers is installed, and its calls where it is not."""

import copy
import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.models import hugging_face

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


class Layer(nn.Module):
    """Attention as transformers' models have it: grouped heads, a cache, and the registered function."""

    def __init__(self, config: Any, layer_idx: int, registered: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.layer_idx, self.registered = config, layer_idx, registered
        self.is_causal, self.head_dim, self.scaling = True, 6, 0.3
        self.maps = nn.ModuleList([nn.Linear(24, size, bias=False) for size in (24, 12, 12)])

    def forward(self, x: Tensor, mask: Tensor | None, **others: Any) -> Tensor:
        q, k, v = (linear(x).unflatten(2, (-1, 6)).transpose(1, 2) for linear in self.maps)
        return self.registered[self.config._attn_implementation](self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **others)[0].flatten(2)


class Model(nn.Module):
    def __init__(self, registered: dict[str, Any], **config: Any) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, _attn_implementation="sdpa", **config)
        self.layers = nn.ModuleList(Layer(self.config, index, registered) for index in range(2))

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, x: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask, **others)
        return x


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions that transformers would hold."""
    held: dict[str, Any] = {}
    interface, masks = types.SimpleNamespace(register=held.__setitem__), types.SimpleNamespace(register=lambda name, function: held.__setitem__(f"mask {name}", function))
    library = types.SimpleNamespace(AttentionInterface=interface, AttentionMaskInterface=masks)
    monkeypatch.setitem(sys.modules, "transformers", library)  # type: ignore[arg-type]
    return held


def made(registered: dict[str, Any], **config: Any) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(registered, **config), torch.randn(2, 9, 24)


def reference(model: Model, x: Tensor, mask: Tensor | None = None, left: int | None = None) -> Tensor:
    operator = m.softmax(prior=() if left is None else zonal.prior.Window(left=left))
    for layer in model.layers:
        q, k, v = (linear(x).unflatten(2, (-1, 6)).transpose(1, 2) for linear in layer.maps)  # type: ignore[union-attr]
        y = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, scale=0.3, key_padding_mask=mask, path="dense")
        x = x + y.float().transpose(1, 2).flatten(2)
    return x


def test_every_layer_gets_its_operator(registered: dict[str, Any]) -> None:
    model, x = made(registered)
    found = hugging_face.convert(model)
    assert [operator is layer.operator for operator, layer in zip(found, model.layers, strict=True)] == [True, True]
    assert hugging_face.operators(model) == found
    assert found[0].learned_parts["score_gate"].shape == (4, 3)
    assert torch.allclose(model(x), reference(model, x), atol=1e-5)
    model(x).square().sum().backward()
    assert all(operator.learned_parts["score_gate"].grad is not None for operator in found)
    with torch.no_grad():
        found[1].learned_parts["score_gate"].fill_(1.0)
    assert not torch.allclose(model(x), reference(model, x), atol=1e-3)
    # again, with another: by a spec, whose open scale is the layer's
    hugging_face.convert(model, "softmax")
    assert torch.allclose(model(x), reference(model, x), atol=1e-5)
    hugging_face.convert(model, m.cosine(temperature=0.2))
    assert hugging_face.operators(model)[0].learned_parts["score_log_temperature"].shape == (4,)
    assert not torch.allclose(model(x), reference(model, x), atol=1e-3)


def test_padding_and_windows(registered: dict[str, Any]) -> None:
    model, x = made(registered, sliding_window=4)
    hugging_face.convert(model)
    real = torch.arange(9) >= torch.tensor([[0], [3]])
    mask = registered["mask zonal"](q_length=9, kv_length=9, q_offset=0, kv_offset=0, attention_mask=real, allow_is_causal_skip=True, mask_function=None)
    wanted = reference(model, x, real, left=3)
    assert torch.allclose(model(x, mask.long(), sliding_window=4)[real], wanted[real], atol=1e-5)
    # what a window's cache holds: the last keys, and the mask of those
    cut = registered["mask zonal"](q_length=1, kv_length=4, q_offset=8, kv_offset=5, attention_mask=real, allow_is_causal_skip=True)
    assert cut is None
    cut = registered["mask zonal"](q_length=1, kv_length=7, q_offset=8, kv_offset=2, attention_mask=real, allow_is_causal_skip=True)
    assert torch.equal(cut, real[:, 2:])
    assert registered["mask zonal"](q_length=9, kv_length=9, attention_mask=None, allow_is_causal_skip=True) is None
    for wrong in ({"allow_is_causal_skip": False}, {"kv_length": 32}, {}):
        with pytest.raises(ArgumentError, match="packed position_ids, an overlay, a bidirectional one"):
            registered["mask zonal"](**{"q_length": 9, "kv_length": 9, **({"allow_is_causal_skip": True} if "kv_length" in wrong else {}), **wrong})


def test_what_does_not_fit(registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(registered)
    with pytest.raises(ArgumentError, match=r"a converted model is required, received Model. Call hugging_face.convert"):
        hugging_face.operators(model)
    with pytest.raises(ArgumentError, match="layers of causal attention is required, received Linear"):
        hugging_face.convert(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="Layer has no operator"):
        hugging_face.attend(model.layers[0], x, x, x, None)
    hugging_face.convert(model)
    for given, words in (
        ({"softcap": 30.0}, "asks for softcap"), ({"s_aux": x}, "asks for s_aux"), ({"output_attentions": True}, "asks for output_attentions"),
        ({"sliding_window": 4}, "keeps 4 tokens, and its operator has no such Window"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            model(x, **given)
    q, k, v = torch.randn(3, 2, 4, 9, 6).unbind(0)
    with pytest.raises(ArgumentError, match=r"asks for scaling=0.5"):
        hugging_face.attend(model.layers[0], q, k[:, :2], v[:, :2], None, scaling=0.5)
    four = torch.ones(2, 1, 9, 9)
    with pytest.raises(ArgumentError, match=r"a mask \(batch, tokens\), nonzero = a real token, is required, received shape \(2, 1, 9, 9\)"):
        model(x, four)
    model.layers[0].attention_dropout = 0.1  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="drops out weights of attention"):
        hugging_face.convert(model)
    stubborn, _ = made(registered)
    monkeypatch.setattr(stubborn, "set_attn_implementation", lambda name: None)
    with pytest.raises(ArgumentError, match="has an attention of its own"):
        hugging_face.convert(stubborn)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArgumentError, match="the package transformers is required"):
        hugging_face.convert(stubborn)


def their(kind: str, **options: Any) -> Any:
    modeling = importlib.import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    sizes: dict[str, Any] = {
        "Llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
        "Mistral": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    }
    torch.manual_seed(0)
    config = getattr(modeling, f"{kind}Config")(vocab_size=29, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.3, **sizes[kind], **options)
    return getattr(modeling, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()


@needs_transformers
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "GPT2"])
def test_transformers_models_say_the_same(kind: str) -> None:
    model = their(kind)
    converted = copy.deepcopy(model)
    hugging_face.convert(converted)
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
    # open gates say something else, and a packed row is refused
    with torch.no_grad():
        for operator in hugging_face.operators(converted):
            operator.learned_parts["score_gate"].fill_(1.0)
    assert (converted(tokens).logits - model(tokens).logits).abs().max() > 1e-2
    if kind == "Llama":
        with pytest.raises(ArgumentError, match="packed position_ids"):
            converted(tokens[:1], position_ids=torch.cat([torch.arange(9), torch.arange(8)])[None], use_cache=False)
        with pytest.raises(ArgumentError, match="static cache"):
            converted.generate(tokens, max_new_tokens=3, cache_implementation="static", do_sample=False)
