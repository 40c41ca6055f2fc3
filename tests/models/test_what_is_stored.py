"""Silent tokens, gates of keys and the gain, from configs, specs and the command line down to the read-out."""

import pytest
import torch

from zonal import attention
from zonal import mechanisms as m
from zonal.cli.app import main
from zonal.errors import ArgumentError
from zonal.models import ModelConfig, TextEncoder, build
from zonal.nn import Attention
from zonal.training import load_model


def model(*layers, **changes):
    built = build(
        ModelConfig(
            vocab_size=12,
            dim=16,
            layers=layers or ("ska(power=1)", "ska(power=0)"),
            heads=2,
            mlp="none",
            conv=0,
            init_std=0.5,
            **changes,
        ),
        0,
    ).double()
    for name, weight in built.named_parameters():  # a layer that writes nothing yet would hide what it reads
        if name.endswith("output.weight"):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    return built


def test_silent_tokens_are_an_action_mask():
    tokens = torch.tensor([[3, 0, 4, 0, 5, 3], [1, 2, 0, 0, 6, 1]])
    silent, all_stored = model(silent_tokens=(0,)), model()
    assert torch.equal(silent(tokens), all_stored(tokens, action_mask=tokens != 0))
    assert not torch.allclose(silent(tokens), all_stored(tokens))
    mixture = "mixture(parts=('ska(power=1)', 'softmax'))"
    assert torch.equal(model(mixture, silent_tokens=(0,))(tokens), model(mixture)(tokens, action_mask=tokens != 0))
    assert not torch.allclose(model(mixture, silent_tokens=(0,))(tokens), model(mixture)(tokens))
    # layers of softmax, and of ridge read-outs with another kernel, have no such choice
    for spec in ("softmax", "kernel_ridge"):
        assert torch.equal(model(spec, silent_tokens=(0,))(tokens), model(spec)(tokens))
    steps, memory = [], silent.empty_memory(2)
    for token in tokens.split(1, 1):
        logits, memory = silent.step(token, memory)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), silent(tokens), rtol=1e-6, atol=1e-8)


def test_silent_tokens_go_through_files_and_old_ones_have_none():
    config = ModelConfig(vocab_size=4, dim=8, layers=("ska",), heads=2, silent_tokens=(1, 2))
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert "silent_tokens" not in ModelConfig(vocab_size=4, dim=8, layers=("ska",), heads=2).to_dict()
    with pytest.raises(ArgumentError, match="tokens from 0 to 3"):
        ModelConfig(vocab_size=4, dim=8, layers=("ska",), heads=2, silent_tokens=(4,))
    with pytest.raises(ArgumentError, match="causal models"):
        TextEncoder(ModelConfig(vocab_size=4, dim=8, layers=("softmax",), heads=2, silent_tokens=(1,)))


def test_gated_layers():
    gated, plain = model("gated(operator='ska(power=1)')"), model("ska(power=1)")
    layer = gated.blocks[0].attention
    assert isinstance(layer, Attention)
    assert layer.key_gate is not None
    tokens = torch.randint(12, (1, 8), generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(gated(tokens), plain(tokens), rtol=1e-6)
    gated(tokens).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in layer.key_gate.parameters()
    )
    lifted = model("gated(operator=\"lifted(operator='ska(power=1, rank=4)', size=6)\")").blocks[0].attention
    assert lifted.key_gate is not None
    assert lifted.lift is not None
    mixed = model("mixture(parts=(\"gated(operator='ridge')\", 'softmax'))").blocks[0].attention
    assert [part.key_gate is not None for part in mixed.parts] == [True, False]
    for spec, words in (
        ("gated(operator='softmax')", "ridge and Koopman"),
        ("gated(operator='kernel_ridge')", r"of the plain product, and 'kernel_ridge' .* Use ska or ridge, or"),
        ("gated(operator='mamba2')", "gated: an operator"),
        ("gated(operator=5)", "must be text"),
    ):
        with pytest.raises(ArgumentError, match=words):
            model(spec)


def test_the_gain():
    assert m.ska(power=1, eta=1.0).learned()["eta"] == [1.0]
    q, k, v = torch.randn(3, 1, 1, 6, 8, dtype=torch.float64).unbind()
    twice, once = (m.resolve(f"ska(power=0, eta={eta})") for eta in (2.0, 1.0))
    torch.testing.assert_close(attention(q, k, v, twice, causal=True), 2 * attention(q, k, v, once, causal=True))


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (
        "train --task mqar-demo --train-examples 8 --test-examples 4 --steps 2 --batch-size 2 --dim 16 "
        "--heads 2 --layers 1 --mlp none --no-tensorboard --out r --silent-tokens 0"
    )
    assert main([*words.split(), "--operator", "gated(operator='ska(power=1, eta=1.0)')"]) == 0
    trained, _ = load_model(tmp_path / "r" / "checkpoint.safetensors")
    assert trained.config.silent_tokens == (0,)
    assert trained.blocks[0].attention.key_gate is not None
    assert abs(trained.blocks[0].attention.operator.learned()["eta"][0] - 1) < 0.1
    capsys.readouterr()
    assert (
        main([*words.replace("tokens 0", "tokens 9999").replace("--out r", "--out s").split(), "--operator", "ska"])
        == 2
    )
    assert "silent_tokens" in capsys.readouterr().err
