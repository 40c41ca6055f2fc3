"""What the tests of several families of compiled kernels share: gradients, and calls through torch's machinery."""

import pytest
import torch
from matrix import Inputs
from torch import Tensor

import zonal
from zonal import Operator
from zonal.errors import PathError
from zonal.models import CausalLM, ModelConfig


def with_gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """y, and the gradients of a sum with random weights; zeros for leaves that y does not depend on."""
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True))]


def everything(operator: Operator, data: Inputs, path: str) -> list[Tensor]:
    """The output, and the gradients of all inputs and of what is learned."""
    return with_gradients(data.run(operator, path), [*data.leaves, *operator.parameters()])


def sample(
    tokens: int = 200, dtype: torch.dtype = torch.float32, heads: int = 2, dim: int = 4, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, tokens, dim, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def run(operator: Operator, tensors: list[Tensor], path: str) -> list[Tensor]:
    """The output of a causal call and all gradients of its sum of squares."""
    y = zonal.attention(*tensors, operator, causal=True, path=path)
    return [y, *torch.autograd.grad(y.square().sum(), [*tensors, *operator.parameters()])]


def check_second_derivatives(operator: Operator, tensors: list[Tensor], path: str) -> None:
    """They are refused."""
    y = zonal.attention(*tensors, operator, causal=True, path=path)
    with pytest.raises(PathError, match="no second derivative"):
        torch.autograd.grad(y.sum(), tensors, create_graph=True)


def check_modes(operator: Operator, tensors: list[Tensor], path: str) -> None:
    """Checkpoints and inference mode give the same bits, and autocast those of bfloat16."""
    plain = run(operator, tensors, path)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path=path)

    y = torch.utils.checkpoint.checkpoint(block, *tensors, use_reentrant=False)
    again = [y, *torch.autograd.grad(y.square().sum(), [*tensors, *operator.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block(*tensors), block(*(x.bfloat16() for x in tensors)))
    with torch.inference_mode():
        assert torch.equal(block(*tensors), plain[0])


def check_compiled_training_step(config: ModelConfig, length: int) -> None:
    """A traced step of a language model is one graph, with the same loss and gradients."""
    torch.manual_seed(0)
    model = CausalLM(config)
    tokens = torch.randint(0, config.vocab_size, (2, length))

    def step(tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    found = []
    for once in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = once(tokens)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 1e-5
