"""The encoder and the vision transformer: bidirectional, any operator, merged tokens, files; and that it learns the
digits.
"""

import pytest
import torch

from zonal import mechanisms as m
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import Encoder, VisionConfig, VisionEncoder
from zonal.nn import MergeSchedule

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
NONE = MergeSchedule((0.0, 0.0))


def tokens(batch=2, length=12, dim=16, seed=1):
    return torch.randn(batch, length, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def encoder(operator="softmax*2", **options):
    torch.manual_seed(0)
    made = Encoder(16, operator, 2, **options).double()
    for block in made.blocks:
        torch.nn.init.normal_(block.attention.output.weight, 0.0, 0.3)
    return made


@pytest.mark.parametrize("operator", ["softmax*2", "sko, cosine", ["yat", m.rewa()], "ridge*2", "linear*2"])
def test_no_order_and_every_token_sees_all(operator):
    """A permutation of tokens permutes what comes out; the last token moves the first."""
    made, x, order = encoder(operator), tokens(), torch.randperm(12, generator=torch.Generator().manual_seed(2))
    y = made(x)
    torch.testing.assert_close(made(x[:, order]), y[:, order], rtol=1e-8, atol=1e-8)
    changed = x.clone()
    changed[:, -1] += 1
    assert (made(changed)[:, 0] - y[:, 0]).abs().max() > 1e-6


def test_padding_is_not_seen():
    made, x, mask = encoder(), tokens(), torch.arange(12)[None] < torch.tensor([[12], [7]])
    torch.testing.assert_close(made(x, key_padding_mask=mask)[1, :7], made(x[1:, :7])[0], **TOLERANCE)


@pytest.mark.parametrize("operator", ["softmax*2", "sko*2"])
def test_equal_tokens_merge_without_a_trace(operator):
    """Where every token has its equal, half of the tokens can go before the first layer: output and gradients stay."""
    made, half = encoder(operator), tokens(2, 6).requires_grad_()
    x = torch.stack([half, half[:, [1, 2, 3, 4, 5, 0]]], 2).flatten(1, 2)
    merge = MergeSchedule((0.5, 0.0))
    state = made.merged(x, merge=merge)
    assert state.x.shape == (2, 6, 16)
    whole, found = made(x), made(x, merge=merge)
    torch.testing.assert_close(found, whole, **TOLERANCE)
    wanted, got = (torch.autograd.grad(y.sin().sum(), half, retain_graph=True)[0] for y in (whole, found))
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    assert (state.mass == 2).all()


def test_schedules_of_an_encoder_and_of_a_call():
    merge = MergeSchedule((0.0, 0.5))
    made, x = encoder(merge=merge), tokens()
    assert made.merged(x).x.shape[1] == 6
    assert made.merged(x, merge=MergeSchedule((0.25, 0.5))).x.shape[1] == 5
    torch.testing.assert_close(made(x, merge=NONE), encoder()(x), **TOLERANCE)
    torch.testing.assert_close(encoder()(x, merge=merge), made(x), **TOLERANCE)
    assert made(x).shape == x.shape
    assert (made(x) - made(x, merge=NONE)).abs().max() > 1e-3
    mask = torch.arange(12)[None] < torch.tensor([[12], [6]])
    state = made.merged(x, key_padding_mask=mask)
    assert torch.equal(state.mass.sum(1), torch.tensor([12.0, 6.0], dtype=torch.float64))


@pytest.mark.parametrize("operator", ["softmax*2", "yat*2", "rewa*2", "linear*2"])
def test_merging_reaches_every_parameter(operator):
    made, x = encoder(operator, merge=MergeSchedule((0.25, 0.5))), tokens()
    made(x).sin().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: encoder(merge=MergeSchedule((0.5,))), "one rate per layer is required, 2 of them, received 1"),
        (lambda: encoder()(tokens(), merge=MergeSchedule((0.5,) * 3)), "2 of them, received 3"),
        (lambda: encoder()(tokens(), merge=(0.0, 0.5)), "merge must be a MergeSchedule or None, received"),
        (
            lambda: encoder("ridge*2", merge=MergeSchedule((0.0, 0.5)))(tokens()),
            "mass is defined for the anchors Row, Count and Raw",
        ),
        (lambda: encoder("softmx"), "Did you mean 'softmax'"),
        (lambda: encoder()(tokens()[:, :0]), r"Encoder: x \(B, T, \d+\) with at least one token is required"),
        (lambda: encoder()(tokens()[..., :3]), r"Encoder: x \(B, T, \d+\) with at least one token is required"),
        (
            lambda: encoder()(tokens(), key_padding_mask=torch.ones(tokens().shape[:2], dtype=torch.int64)),
            "Encoder: key_padding_mask must be a boolean tensor",
        ),
        (lambda: encoder([]), "at least one operator"),
        (lambda: VisionConfig(image=28, patch=5), "patch must divide image=28, received 5"),
        (lambda: VisionConfig(classes=0), "VisionConfig: classes must be a whole number"),
        (lambda: VisionConfig.from_dict({"pach": 4}), "unknown: pach"),
        (lambda: VisionEncoder(VisionConfig(merge=(0.5,))), "one rate per layer is required, 4 of them"),
        (
            lambda: VisionEncoder(VisionConfig())(torch.zeros(2, 28, 28)),
            r"must be floating numbers \(batch, 1, 28, 28\)",
        ),
        (
            lambda: VisionEncoder(VisionConfig()).loss(torch.zeros(2, 1, 28, 28), torch.zeros(2)),
            "one int64 label per image",
        ),
        *(
            (
                lambda label=label: VisionEncoder(VisionConfig()).loss(
                    torch.zeros(2, 1, 28, 28), torch.tensor([3, label])
                ),
                rf"labels must lie in \[0, 10\), received .*{label}",
            )
            for label in (-100, 10)
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_files(tmp_path):
    config = VisionConfig(image=8, patch=2, dim=16, layers="softmax, sko", heads=2, merge=(0.0, 0.5))
    assert VisionConfig.from_dict(config.to_dict()) == config
    made, images = VisionEncoder(config, seed=3), torch.randn(3, 1, 8, 8)
    made.save(tmp_path / "model.safetensors")
    assert torch.equal(VisionEncoder.load(tmp_path / "model.safetensors")(images), made(images))
    again = VisionEncoder(config, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), again.state_dict().values(), strict=True))
    (tmp_path / "model.safetensors").write_bytes(b"no such file")
    with pytest.raises(FileFormatError, match="load vision model"):
        VisionEncoder.load(tmp_path / "model.safetensors")


def test_a_loss_has_the_digits_of_its_logits():
    made = VisionEncoder(VisionConfig(image=8, patch=4, dim=8, heads=2), seed=0).double()
    images, labels = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 4, 9])
    total, count = made.loss(images, labels)
    wanted = -made(images).log_softmax(-1).gather(1, labels[:, None]).sum()
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=0)
    assert count == 3


def test_a_patch_is_a_token():
    made = VisionEncoder(VisionConfig(image=8, patch=4, dim=8, heads=2), seed=0)
    images = torch.zeros(1, 1, 8, 8)
    changed = images.clone()
    changed[0, 0, 5, 2] = 1.0
    apart = (made.tokens(changed) - made.tokens(images)).abs().amax(-1)[0]
    assert torch.equal(apart > 0, torch.tensor([False, False, True, False]))


def test_digits_are_learned_and_survive_merging():
    """scikit-learn's 8 x 8 digits: 60 updates, then a third of the patches merged away at evaluation alone."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
    model = VisionEncoder(VisionConfig(image=8, patch=2, dim=32, layers=("softmax",) * 2, heads=4), seed=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        rows = torch.randint(1400, (128,), generator=generator)
        total, count = model.loss(images[rows], labels[rows])
        optimiser.zero_grad()
        (total / count).backward()
        optimiser.step()
    with torch.no_grad():
        right = [
            float((model(images[1400:], merge=merge).argmax(-1) == labels[1400:]).float().mean())
            for merge in (None, MergeSchedule((0.0, 0.33)))
        ]
    assert right[0] > 0.7
    assert right[1] > 0.65
