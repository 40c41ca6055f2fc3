"""What maps choose from keys: chosen once by Operator.fit, right, kept with the model, refused while it is missing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Operator, link, store
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.features import Anchors, FeatureMap, Features, LowRankSquare, Nystrom, PositiveRandom, Slay, TensorProduct
from zonal.models import CausalLM, ModelConfig
from zonal.nn import Attention

DIM = 6
MAPS: dict[str, FeatureMap] = {
    "anchors": Anchors(5, "kmeans"),
    "anchors-learned": Anchors(5, "kmeans", learn=True),
    "nystrom": Nystrom(8, link.Yat(1.0), "kmeans"),
    "low-rank": LowRankSquare(3, choice="pca"),
    "tensor": TensorProduct(LowRankSquare(2, choice="pca"), PositiveRandom(4, 0.3)),
    "slay": Slay(polynomial=Anchors(4, "kmeans"), draws=4),
}
every_map = pytest.mark.parametrize("features", MAPS.values(), ids=MAPS)


def tokens(heads: int = 4, kv_heads: int = 2, length: int = 20, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(3, h, length, DIM, generator=draw, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]


@every_map
def test_a_fit_is_what_prepare_gives(features: FeatureMap) -> None:
    """Of each key head's own unit keys, from all sequences; what is drawn stays as the seed gives it."""
    _, k, _ = tokens()
    operator = m.of_features(features, seed=3, allow_signed=True).fit(k).double()
    unit = torch.nn.functional.normalize(k, dim=-1).transpose(0, 1).flatten(1, 2)
    wanted = features.prepare(DIM, 2, seed=3, dtype=torch.float64, keys=unit)
    state = {name.partition("score_")[2]: value for name, value in operator.state_dict().items()}
    assert set(state) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(state[name], value, atol=1e-6), name
    assert set(features.chosen) <= set(wanted)
    assert all((f"score_{name}" in operator.learned_parts) == (name in features.learned) for name in wanted)


@every_map
def test_it_is_kept(features: FeatureMap, tmp_path: Path) -> None:
    """Through a file into an operator made from the declaration, and through replace; other keys give another fit."""
    q, k, v = tokens()
    operator = m.of_features(features, allow_signed=True).fit(k).double()
    y = zonal.attention(q, k, v, operator, causal=True)
    assert bool(y.isfinite().all())
    store.save_tensors(tmp_path / "x.safetensors", operator.state_dict(), {"kind": "x", "operator": operator.config()})
    state, header = store.load_tensors(tmp_path / "x.safetensors", "x")
    again = Operator.from_config(header["operator"]).double()
    with pytest.raises(ArgumentError, match="have seen none"):
        zonal.attention(q, k, v, again, causal=True)
    again.load_state_dict(state)
    assert torch.equal(zonal.attention(q, k, v, again, causal=True), y)
    assert torch.equal(zonal.attention(q, k, v, operator.replace(), causal=True), y)
    other = m.of_features(features, allow_signed=True).fit(tokens(seed=1)[1]).double()
    assert not torch.allclose(zonal.attention(q, k, v, other, causal=True), y, atol=1e-6)


@every_map
def test_what_has_seen_no_keys_is_refused(features: FeatureMap) -> None:
    q, k, v = tokens()
    for operator in (m.of_features(features, allow_signed=True), m.of_features(features, dim=DIM, allow_signed=True)):
        with pytest.raises(ArgumentError, match=r"from keys, and have seen none. Use operator.fit\(k\)"):
            zonal.attention(q, k, v, operator)


def test_heads_that_share_their_numbers_share_a_fit() -> None:
    _, k, _ = tokens()
    operator = Operator(Features(Anchors(5, "kmeans"), dim=DIM), link.Identity()).fit(k)
    assert operator.state_dict()["fixed_parts.score_anchors"].shape == (1, 5, DIM)


def test_a_model_keeps_its_landmarks() -> None:
    """Made from a spec, fitted layer by layer to the keys that the layers give, saved and loaded."""
    spec = "slay(scale='small', choice='kmeans')"
    config = ModelConfig(30, 32, (spec, spec), 4, kv_heads=2)
    torch.manual_seed(0)
    model, other = CausalLM(config), CausalLM(config)
    ids = torch.randint(0, 30, (2, 17))
    with pytest.raises(ArgumentError, match="have seen none"):
        model(ids)
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    for layer in layers:
        keys: list[Tensor] = []
        handle = layer.key.register_forward_hook(
            lambda module, inputs, output, keys=keys: keys.append(output.unflatten(2, (2, -1)).transpose(1, 2))
        )
        with pytest.raises(ArgumentError, match="have seen none"):
            model(ids)
        handle.remove()
        layer.operator = layer.operator.fit(keys[0])
        assert layer.operator.spec == spec
    logits = model(ids)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), logits)
    logits.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_fits_that_mean_nothing() -> None:
    _, k, _ = tokens()
    with pytest.raises(ArgumentError, match="chooses nothing from keys"):
        m.slay().fit(k)
    with pytest.raises(ArgumentError, match="chooses nothing from keys"):
        m.softmax().fit(k)
    open_map = m.of_features(Anchors(5, "kmeans"))
    with pytest.raises(
        ArgumentError, match=r"\(batch, key heads, tokens, dim\) are required, received shape \(20, 6\)"
    ):
        open_map.fit(k[0, 0])
    with pytest.raises(ArgumentError, match="at least 5 keys per head are required, received 3"):
        open_map.fit(k[:1, :, :3])
    with pytest.raises(ArgumentError, match="keys of 2 heads of size 6 are required, received 3 of size 6"):
        open_map.fit(k).fit(torch.cat([k, k[:, :1]], 1))
    with pytest.raises(ArgumentError, match="of size 6 are required, received 2 of size 5"):
        open_map.fit(k).fit(k[..., :5])
    with pytest.raises(ArgumentError, match="no landmarks to choose"):
        m.slay(polynomial="exact", choice="kmeans")
    assert replace(Anchors(5), choice="kmeans").chosen == ("anchors",)
    assert Anchors(5).chosen == ()
