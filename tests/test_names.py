"""Arguments by the names of other libraries, operators by their specs, masks and layouts that are most likely another
library's.
"""

import inspect
import typing
import warnings

import pytest
import torch

import zonal
from zonal import Memory, attention, models, nn, tasks, training
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.memory.reading import Readable
from zonal.names import known_names
from zonal.training.search import SearchSpec

FOREIGN = (
    "is_causal",
    "attn_mask",
    "dropout_p",
    "embed_dim",
    "num_heads",
    "need_weights",
    "head_first",
    "enable_gqa",
    "batch_first",
    "n_heads",
)
LAYERS = [
    cls
    for cls in vars(nn).values()
    if isinstance(cls, type) and issubclass(cls, nn.TokenMixer) and cls is not nn.TokenMixer
]
ENTRIES = [
    attention, zonal.explain, zonal.plan, zonal.Plan.__call__, zonal.Decoder.step, zonal.potentials,
    Memory.empty, Memory.absorb, Memory.absorb_, Memory.merge,
    Readable.read, *LAYERS, nn.Block,
    *(cls.forward for cls in LAYERS), models.ModelConfig, models.CausalLM, models.CausalLM.forward,
    models.CausalLM.generate, models.CausalLM.prefill,
    training.TrainConfig, training.ComparisonSpec, SearchSpec, training.train,
    *(getattr(tasks, name) for name in tasks.__all__ if isinstance(getattr(tasks, name), type)
      and issubclass(getattr(tasks, name), tasks.Task) and getattr(tasks, name) is not tasks.Task),
    models.Encoder, models.TextEncoder, models.VisionConfig, models.VisionEncoder, models.build,
    *(getattr(m, name) for name in m.names()),
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__qualname__)
def test_another_librarys_name_is_refused_with_the_name_here(entry):
    for name in FOREIGN:
        with pytest.raises(ArgumentError, match=f"no argument '{name}'") as caught:
            entry(**{name: None})
        assert isinstance(caught.value, TypeError)
        here = {"is_causal": "causal", "embed_dim": "dim", "num_heads": "heads", "n_heads": "heads"}.get(name)
        if here in inspect.signature(entry).parameters:
            assert f"It is called {here} here" in str(caught.value)


def test_a_misspelt_name_is_told_the_nearest():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ArgumentError, match="Did you mean causal"):
        attention(q, q, q, m.softmax(), casual=True)
    with pytest.raises(ArgumentError, match=r"key_padding_mask \(bool, True = real token\)"):
        attention(q, q, q, m.softmax(), attn_mask=None)


def test_a_type_error_from_within_is_its_own():
    @known_names
    def call(x=1):
        return len(x)

    with pytest.raises(TypeError, match="has no len"):
        call(x=1)


def test_signatures_and_hints_survive():
    assert list(inspect.signature(nn.Attention).parameters)[:3] == ["dim", "heads", "operator"]
    assert typing.get_type_hints(nn.Attention.__init__)["heads"] is int
    assert inspect.signature(attention).parameters["causal"].default is False
    assert attention.__doc__
    assert [*inspect.signature(models.ModelConfig).parameters][:2] == ["vocab_size", "dim"]


def test_compiled_without_breaks():
    layer = nn.Attention(16, 2, "softmax")
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_operators_are_named_by_specs():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    for spec, operator in (("sko(degrees=(1, 2))", m.sko(degrees=(1, 2))), ("ridge", m.ridge())):
        assert torch.equal(attention(q, k, v, spec, causal=True), attention(q, k, v, operator, causal=True))
    memory = Memory.empty("ridge", 1, 2, 4, 4).absorb(k, v)
    y, after = attention(q, k, v, "ridge", causal=True, memory=memory)
    assert after.count == 10
    assert y.shape == v.shape
    assert zonal.explain("sko", (1, 2, 8, 4)).operator == "sko"
    with pytest.raises(ArgumentError, match="Did you mean 'softmax'"):
        attention(q, k, v, "softmaxx")
    with pytest.raises(ArgumentError, match="received a Tensor"):
        attention(q, k, v, torch.ones(5, 5))


def test_a_mask_that_hides_all_keys_warns():
    q = torch.randn(2, 2, 5, 4)
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, q, q, "softmax", key_padding_mask=real)
    with pytest.warns(UserWarning, match="hides every key of 1 of 2 sequences.*True marks real tokens"):
        y = attention(q, q, q, "softmax", key_padding_mask=~real)
    assert not y[0].any()
    memory = Memory.empty("softmax", 2, 2, 4, 4).absorb(q, q)
    with warnings.catch_warnings():  # a sequence that has ended while others go on
        warnings.simplefilter("error")
        attention(
            q[:, :, :1],
            q[:, :, :1],
            q[:, :, :1],
            memory.operator,
            causal=True,
            memory=memory,
            key_padding_mask=torch.tensor([[True], [False]]),
        )


def test_tokens_in_the_place_of_heads_warn():
    swapped = torch.randn(1, 160, 2, 4)
    with pytest.warns(UserWarning, match=r"160 heads of 2 tokens.*transpose\(1, 2\)"):
        attention(swapped, swapped, swapped, "softmax")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in ((1, 128, 2, 4), (1, 160, 1, 4), (1, 160, 64, 4)):
            attention(*torch.randn(3, *shape).unbind(), "softmax")
    with pytest.raises(ArgumentError, match="batch, heads, tokens, dim"):
        attention(torch.randn(1, 7, 4, 4), *torch.randn(2, 1, 5, 2, 4).unbind(), "softmax")
