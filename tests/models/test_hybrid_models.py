"""Models of unlike layers: lists in one line, recurrences beside attention, one memory, training, files, and another
library's weights.
"""

import importlib.util

import pytest
import torch

from zonal import mechanisms
from zonal.errors import ArgumentError
from zonal.models import CausalLM, ModelConfig, build, layer_list
from zonal.models.convert import mamba2_from_transformers
from zonal.models.layers import GATED, LIFTED, MIXTURE, RECURRENCES, entry_of, layers_for
from zonal.nn import Attention, Mamba2, Mamba3

LINE = "mamba2(state=8, head_dim=8)*2, ska(power=0), mamba3(state=8, head_dim=8), softmax"

RELATIVES = "mesanet(state=8, head_dim=8), gated_kalmanet(state=8, head_dim=8), gated_deltanet(state=8, head_dim=8)"
lines = pytest.mark.parametrize("line", [LINE, RELATIVES], ids=["hybrid", "relatives"])


def make(line=LINE, **options):
    settings = {"vocab_size": 23, "dim": 16, "heads": 2, "conv": 3} | options
    model = build(ModelConfig(layers=line, **settings), seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.blocks:  # a projection that starts at zero would hide what is before it
            block.attention.output.weight.normal_(0.0, 0.3, generator=generator)
    return model


def tokens(batch=2, length=17, seed=1):
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        ("softmax", ("softmax",)),
        ("mamba2*3, ska(power=0), mamba2*2", ("mamba2",) * 3 + ("ska(power=0)",) + ("mamba2",) * 2),
        ("[ mamba2 * 2 , sko(degrees=(2, 3))*1]", ("mamba2", "mamba2", "sko(degrees=(2, 3))")),
        ("mamba2(state=64)*12", ("mamba2(state=64)",) * 12),
    ],
)
def test_layer_lists(line, layers):
    assert layer_list(line) == layers


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mamba2*0", "at least once"),
        ("mamba2,,ska", "empty entry"),
        ("", "empty entry"),
        ("ska(power=1", "unclosed bracket"),
        ("a]", "without an opening"),
    ],
)
def test_lists_that_cannot_be_read(line, words):
    with pytest.raises(ArgumentError, match=words):
        layer_list(line)


def test_entries_of_a_comparison():
    assert layers_for("mamba2", 3) == ("mamba2",) * 3
    assert layers_for("[mamba2*2, ska]", 3) == ("mamba2", "mamba2", "ska")
    for layers in (("ska",) * 4, ("mamba2", "mamba2", "sko(degrees=(2, 3))", "mamba2")):
        assert layers_for(entry_of(layers), 4) == layers
    assert entry_of(("a", "b", "b")) == "[a, b*2]"
    with pytest.raises(ArgumentError, match="has 3 layers, the model has 4"):
        layers_for("[mamba2*2, ska]", 4)


def test_each_layer_is_what_the_line_says():
    model = make()
    assert [type(block.attention) for block in model.blocks] == [Mamba2, Mamba2, Attention, Mamba3, Attention]
    assert model.config.layers == layer_list(LINE)
    assert ModelConfig.from_dict(model.config.to_dict()) == model.config
    assert [layer["operator"] for layer in model.learned()] == list(model.config.layers)


def test_queries_and_keys_are_lifted():
    line = (
        "lifted(operator='ska(power=1, rank=4)', size=6), mixture(parts=(\"lifted(operator='ska(rank=4)', "
        "size=5)\", 'softmax'))"
    )
    model = build(ModelConfig(23, layers=line, dim=16, heads=2, conv=3), seed=3).double()
    first, (inner, plain) = model.blocks[0].attention, model.blocks[1].attention.parts
    assert first.qk_dim == 4
    assert [layer.lift.projection.out_features for layer in (first, inner)] == [6, 5]
    assert plain.lift is None
    x = tokens()
    memory, parts = model.empty_memory(2), []
    for piece in x.split([6, 1, 10], dim=1):
        logits, memory = model.step(piece, memory)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lifted(operator='mamba2', size=6)", "an operator, such as 'ska\\(power=1\\)', and a size >= 1"),
        ("lifted(operator='ska', size=0)", "received 'ska' and 0"),
        ("lifted(operator='ska(rank=4)', size=7)", "at most 3 dim / 2 = 6"),
        ("lifted(operator='nothing', size=4)", "unknown operator 'nothing'"),
    ],
)
def test_what_cannot_be_lifted(spec, words):
    with pytest.raises(ArgumentError, match=words):
        make(spec)


def test_an_attention_layer_says_that_a_name_is_of_a_whole_layer():
    assert {*RECURRENCES, MIXTURE, LIFTED, GATED} == set(mechanisms.WHOLE_LAYERS)
    for name in mechanisms.WHOLE_LAYERS:
        with pytest.raises(ArgumentError, match=f"'{name}' names a layer of a model, and an operator of attention is"):
            Attention(16, heads=2, operator=f"{name}(state=4)")


def test_equal_names_start_equal_beside_other_layers():
    one, other = (
        build(ModelConfig(23, 16, layers, 2), seed=3) for layers in (LINE, "mamba2(state=8, head_dim=8), softmax*4")
    )
    mine, theirs = one.state_dict(), other.state_dict()
    shared = [
        name
        for name in mine
        if name in theirs and mine[name].shape == theirs[name].shape and not name.startswith("blocks.2.attention")
    ]
    assert "blocks.0.attention.input.weight" in shared
    assert {
        "blocks.0.attention.step_bias",
        "blocks.3.mlp.up.weight",
        "blocks.4.attention.query.weight",
        "embedding.weight",
    } < set(shared)
    assert all(torch.equal(mine[name], theirs[name]) for name in shared)


def test_pieces_and_single_tokens_equal_one_pass():
    model = make().double()
    x = tokens()
    memory, parts = model.empty_memory(2), []
    for piece in x.split([6, 1, 1, 9], dim=1):
        logits, memory = model.step(piece, memory)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=1e-9, atol=1e-9)
    attended = [
        layer
        for layer, block in zip(memory.layers, model.blocks, strict=True)
        if block.attention.operator.name == "softmax"
    ]
    assert model.memory_bytes(17) * 2 == memory.nbytes
    assert len(attended) == 1
    assert (
        model.memory_bytes(34) - model.memory_bytes(17)
        == model.memory_bytes(51) - model.memory_bytes(34)
        == 17 * 2 * 16 * 8
    )


@lines
def test_packed_and_padded_rows(line):
    model = make(line).double()
    documents = [tokens(1, n, seed=n) for n in (3, 1, 6)]
    packed = model(torch.cat(documents, 1), cu_seqlens=torch.tensor([0, 3, 4, 10]))
    alone = [model(document) for document in documents]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-9, atol=1e-9)
    x, mask = tokens(3, 6, seed=9), torch.zeros(3, 6, dtype=torch.bool)
    for row, document in enumerate(documents):
        x[row, 6 - document.shape[1] :], mask[row, 6 - document.shape[1] :] = document[0], True
    torch.testing.assert_close(
        model(x, key_padding_mask=mask)[mask], torch.cat([y[0] for y in alone]), rtol=1e-9, atol=1e-9
    )


@lines
def test_generation_goes_on_from_the_memory_and_files(line, tmp_path):
    model = make(line)
    prompt = tokens(2, 9)
    drawn = list(model.generate(prompt, 5, temperature=0))
    again = prompt
    for token in drawn:
        assert torch.equal(model(again)[:, -1].argmax(-1), token)
        again = torch.cat([again, token[:, None]], 1)
    _, memory = model.step(prompt, model.empty_memory(2))
    memory.save(tmp_path / "memory.safetensors")
    model.save(tmp_path / "model.safetensors")
    loaded = CausalLM.load(tmp_path / "model.safetensors")
    after, _ = loaded.step(drawn[0][:, None], loaded.load_memory(tmp_path / "memory.safetensors"))
    torch.testing.assert_close(after, model.step(drawn[0][:, None], memory)[0], rtol=0, atol=0)


@lines
def test_a_few_steps_learn_and_reach_every_parameter(line):
    model = make(line, mlp="none")
    x = tokens(4, 24)
    targets = torch.cat([x[:, 1:], torch.full((4, 1), -100)], 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        total, count = model.loss(x, targets)
        optimiser.zero_grad()
        (total / count).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        losses.append((total / count).item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_of_transformers_model(tied):
    modeling = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    config = modeling.Mamba2Config(
        vocab_size=23, hidden_size=24, num_heads=6, head_dim=8, state_size=16, n_groups=2, chunk_size=16,
        num_hidden_layers=3,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    theirs = modeling.Mamba2ForCausalLM(config)
    if not hasattr(theirs.backbone.layers[0].mixer.norm, "group_size"):
        pytest.skip("before 5.23 transformers normalises all groups at once")
    model = mamba2_from_transformers(config.to_dict(), theirs.state_dict())
    x = tokens(2, 51)
    expected, logits = theirs(x).logits, model(x)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    expected.square().mean().backward()
    logits.square().mean().backward()
    pairs = [
        ("backbone.embeddings.weight", "embedding.weight"),
        ("backbone.layers.1.mixer.A_log", "blocks.1.attention.log_rate"),
    ]
    pairs += [
        ("backbone.layers.0.mixer.in_proj.weight", "blocks.0.attention.input.weight"),
        ("backbone.layers.2.norm.weight", "blocks.2.attention_norm.weight"),
    ]
    for other, mine in pairs:
        wanted, got = theirs.get_parameter(other).grad, model.get_parameter(mine).grad
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max(), mine
    with pytest.raises(ArgumentError, match="extra is unknown"):
        mamba2_from_transformers(config.to_dict(), {**theirs.state_dict(), "extra": torch.ones(1)})
    with pytest.raises(ArgumentError, match=r"norm_f\.weight is missing"):
        mamba2_from_transformers(config.to_dict(), {k: v for k, v in theirs.state_dict().items() if "norm_f" not in k})
