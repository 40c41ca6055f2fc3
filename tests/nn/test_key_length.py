"""How long the keys of ridge and Koopman read-outs are when a layer starts, and that their length counts and can be
learned.
"""

import pytest
import torch
import torch.nn.functional as F

import zonal
from zonal import anchor, link, score
from zonal import mechanisms as m
from zonal.kernels import native as native_kernels
from zonal.nn import Attention

CASES = {
    "ridge": ("ridge", {}),
    "ridge with norms": ("ridge", {"qk_norm": True, "rotary": True}),
    "ridge with a convolution": ("ridge", {"conv": 4}),
    "ska 0": ("ska(power=0)", {}),
    "ska 1": ("ska(power=1)", {"kv_heads": 2}),
    "ska 2": ("ska(power=2)", {"conv": 3}),
    "ska of a small rank": ("ska(power=1, rank=4)", {}),
    "ska that fades": ("ska(power=1, fading=True)", {}),
    "lifted": ("ska(power=1)", {"cg_lift": 6}),
    "lifted with norms": ("ska(power=0)", {"cg_lift": 12, "qk_norm": True}),
    "a wide limit": ("ridge(key_limit=10.0)", {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_keys_start_inside_the_limit_and_their_length_has_a_gradient(case, seed):
    spec, options = CASES[case]
    torch.manual_seed(seed)
    layer = Attention(64, 4, spec, **options).double()
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    assert isinstance(layer.operator.score, score.Dot)
    limit = layer.operator.score.key_limit
    assert limit is not None
    lengths = layer.stored_keys(x).norm(dim=-1)[:, :, 4:]  # a convolution has seen a whole window
    assert (lengths >= limit * (1 - 1e-12)).double().mean() < 0.05
    assert 0.1 < lengths.mean() / limit < 0.4

    _, k, v, _, _ = layer._projected(x)
    q = torch.randn(2, 4, 40, k.shape[-1], dtype=torch.float64)
    k = k.detach().requires_grad_()
    decay = torch.full(k.shape[:3], -0.01, dtype=torch.float64) if "fading" in spec else None
    y = zonal.attention(q, k, v.detach(), layer.operator, causal=True, log_decay=decay)
    assert isinstance(y, torch.Tensor)
    (dk,) = torch.autograd.grad(y.square().sum(), k)
    radial = (dk * k).sum(-1).abs() / (dk.norm(dim=-1) * k.norm(dim=-1)).clamp_min(1e-300)
    assert (radial[:, :, :-1] > 1e-6).double().mean() > 0.95  # the last key is seen by no query


def test_every_layer_learns_the_factor_from_the_start():
    torch.manual_seed(0)
    layer = Attention(32, 4, "ska(power=1)", kv_heads=2)
    torch.nn.init.normal_(layer.output.weight)  # which starts at zero
    x = torch.randn(2, 30, 32)
    layer(x).square().sum().backward()
    factor = layer.operator.learned_parts["score_log_factor"]
    assert factor.shape == (2,)
    assert (factor.grad.abs() > 1e-4).all()


@pytest.mark.parametrize("length", [1.0, 0.5, 0.25])
def test_a_shorter_key_is_stored_more_weakly(length):
    """What comes back of one stored value is |z|^2 / (|z|^2 + ridge) of it, times eta, for a stored key z of that
    length.
    """
    layer = Attention(32, 2, "ska(power=0)")
    k, v = F.normalize(torch.randn(1, 2, 1, 16), dim=-1), torch.randn(1, 2, 1, 16)
    stored = length / layer.operator.learned_parts["score_log_factor"].exp().view(1, -1, 1, 1) * k
    found = layer.empty_memory(1).memory.absorb(stored, v).read(stored)
    assert torch.allclose(found, 1.5 * length**2 / (length**2 + 0.1) * v, atol=1e-5)


@pytest.mark.parametrize("power", [0, 1])
def test_facts_five_times_longer_than_noise_are_recalled_from_the_start(power):
    """Where a ridge that follows the longest key does it."""
    torch.manual_seed(0)
    facts, noise = torch.arange(16 - power), 64
    layer = Attention(64, 2, f"ska(power={power})")
    operators = {
        "longest": m.ska(power=power, key_limit=None, running_max=True),
        "layer": layer.operator,
        "cut": m.ska(power=power),
    }
    k = torch.randn(8, 2, 16 + noise, 32)
    k[:, :, 16:] /= 5
    v = torch.randn(8, 2, 16 + noise, 32).sign()
    for length in (1.0, 5.0):  # facts, or noise, as long as the keys of a layer
        found = {}
        for name, operator in operators.items():
            with torch.no_grad():
                y = zonal.attention(length * k[:, :, :16], length * k, v, operator)
            found[name] = float(((y @ v.mT).argmax(-1)[:, :, facts] == facts + power).float().mean())
        assert found["longest"] >= 0.99
        assert found["layer"] >= 0.99
        assert power == 0 or found["cut"] < 0.9  # where all keys are cut to one length


@pytest.mark.parametrize("path", ["dense", "chunked", "streaming"])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_all_paths_take_the_factor_and_give_its_gradient(path, kernels, monkeypatch):
    if kernels == "off":
        monkeypatch.setenv(native_kernels.VARIABLE, "off")
    torch.manual_seed(0)
    operator = zonal.Operator(
        score.Dot(scale=1.0, key_limit=1.0, factor=0.3), link.Identity(), anchor.Koopman(power=1)
    ).for_heads(4, 2)
    with torch.no_grad():
        operator.learned_parts["score_log_factor"].copy_(torch.tensor([-1.6, -0.7]))
    exact = (
        operator.double() if path == "dense" else zonal.Operator.from_config(operator.config()).for_heads(4, 2).double()
    )
    exact.load_state_dict(operator.state_dict())
    q, k, v = torch.randn(1, 4, 40, 8), 2 * torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 5)
    factor = exact.learned_parts["score_log_factor"].exp().repeat_interleave(2).view(1, -1, 1, 1)
    plain = m.ska(power=1).double()
    with torch.no_grad():
        wanted = zonal.attention(
            q.double() * factor,
            (k.double().repeat_interleave(2, 1) * factor),
            v.double().repeat_interleave(2, 1),
            plain,
            causal=True,
            path="dense",
        )
        assert torch.allclose(
            zonal.attention(q, k, v, operator.float(), causal=True, path=path).double(), wanted, atol=1e-4
        )
    y = zonal.attention(q.double(), k.double(), v.double(), exact.double(), causal=True, path="dense")
    y.square().sum().backward()
    operator = operator.float()
    operator.zero_grad()
    zonal.attention(q, k, v, operator, causal=True, path=path).square().sum().backward()
    got = operator.learned_parts["score_log_factor"].grad
    reference = exact.learned_parts["score_log_factor"].grad
    assert torch.allclose(got.double(), reference.double(), rtol=2e-3)
    assert got.abs().min() > 0.01


def test_a_decoder_steps_as_it_is_trained():
    torch.manual_seed(0)
    layer = Attention(32, 4, "ska(power=1)", kv_heads=2)
    torch.nn.init.normal_(layer.output.weight)
    x = torch.randn(2, 24, 32)
    with torch.no_grad():
        whole = layer(x)
        memory, rows = layer.empty_memory(2), []
        for t in range(24):
            y, memory = layer(x[:, t : t + 1], memory)
            rows.append(y)
            if t == 11:  # what is kept from step to step follows what is learned
                layer.operator.learned_parts["score_log_factor"].add_(0.0)
    assert torch.allclose(torch.cat(rows, 1), whole, atol=1e-4)


def test_a_call_of_its_own_keeps_keys_as_they_come():
    operator = m.ska()
    assert "score_log_factor" not in operator.learned_parts
    assert "factor" not in operator.config()["score"]  # as in files written before there was one
    k = torch.tensor([[[[3.0, 4.0], [0.3, 0.4]]]])
    assert torch.allclose(operator.score.prepare_key(k, {}).norm(dim=-1), torch.tensor([1.0, 0.5]))
