"""Models on a CUDA device: the loss and gradients of a CPU, and decoding from memories, for every kind of layer."""

import copy

import pytest
import torch

from zonal.models import ModelConfig, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)",
    ),
]

LAYERS = (
    "softmax", "cosine", "sko", "yat", "squared_affine", "polynomial_square(degree=4, eps=1.0, d_qk=8)", "linear",
    "hedgehog", "performer", "slay", "retention", "ridge", "kernel_ridge", "ska(power=0)", "ska(power=1)",
    "ska(power=2)", "ska(power=(0, 1), key_limit=None)", "ska(power=1, fading=True)",
    "ska(power=2, chunk=16, eps=0.001, key_limit=None, running_max=True, spectral_norm='power')",
    "gated(operator='ska(power=1)')", "local_global(window=16, first=4, far='hedgehog(size=16)')", "rewa",
    "rewa_functional", "rewa_oscillatory", "rewa_riemannian", "rewa_topological",
    "mamba2", "mamba3", "gated_deltanet", "mesanet", "gated_kalmanet",
)  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_a_model_is_what_it_is_on_a_cpu(layer: str) -> None:
    """Float32 on both; an entry of a gradient may differ by a thousandth of the largest of its parameter."""
    here = build(ModelConfig(40, 64, (layer,), 2, conv=3), seed=0)
    tokens = torch.randint(0, 40, (2, 151), generator=torch.Generator().manual_seed(0))
    there = copy.deepcopy(here).cuda()
    losses = []
    for model in (here, there):
        on = tokens.to(next(model.parameters()).device)
        loss = model.loss(on[:, :-1], on[:, 1:])[0]
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for (name, a), b in zip(there.named_parameters(), here.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            off = (a.grad.cpu() - b.grad).abs().max()
            assert off <= 1e-3 * b.grad.abs().max() + 1e-7, f"gradient of {name} is off by {off:.3g}"
    with torch.no_grad():
        on = tokens.cuda()
        whole = there(on)
        memory, rows = there.prefill(on[:, :140])[1], []
        for place in range(140, 145):
            logits, memory = there.step(on[:, place : place + 1], memory)
            rows.append(logits)
    torch.testing.assert_close(torch.cat(rows, 1), whole[:, 140:145], rtol=1e-3, atol=1e-3)
