"""An output matrix with a hook or an adapter is called, as any other module of a model is."""

import torch
from torch import Tensor, nn

from zonal.models import CausalLM, ModelConfig


class _Shifted(nn.Module):
    """A head with an adapter: one more for every logit of token 3."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.shift = base, nn.Parameter(torch.ones(1))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.shift * nn.functional.one_hot(torch.tensor(3), 11)


def test_logits_losses_and_predictions_go_through_it() -> None:
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(vocab_size=11, dim=8, layers=("softmax",), heads=2, tie_embeddings=False))
    tokens = torch.randint(11, (2, 7))
    targets = torch.randint(11, (2, 7))
    plain, bare = model(tokens), model.loss(tokens, targets)[0]
    assert model.head is not None
    model.head = _Shifted(model.head)  # type: ignore[assignment]
    shifted = plain + nn.functional.one_hot(torch.tensor(3), 11)
    expected = nn.functional.cross_entropy(shifted.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(model(tokens), shifted)
    torch.testing.assert_close(model.prefill(tokens)[0], shifted[:, -1])
    loss, count = model.loss(tokens, targets)
    assert count == 14
    torch.testing.assert_close(loss, expected.sum())
    assert float((loss - bare).detach().abs()) > 0.1
    loss.backward()
    assert float(model.head.shift.grad.abs()) > 0  # type: ignore[union-attr]
    found = model.predict(tokens, targets)
    torch.testing.assert_close(found.loss, expected)
    assert torch.equal(found.predicted, shifted.flatten(0, 1).argmax(1))


def test_hooks_of_a_head_run() -> None:
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(vocab_size=11, dim=8, layers=("softmax",), heads=2, tie_embeddings=False))
    assert model.head is not None
    model.head.register_forward_hook(lambda module, given, y: y * 0)
    tokens = torch.randint(11, (1, 5))
    assert not model(tokens).any()
    loss, _ = model.loss(tokens, tokens)
    torch.testing.assert_close(loss, 5 * torch.tensor(11.0).log())
