"""The compiled convolution and gated norm against torch in float64: values and all gradients, tails, padding, packing,
strides, parts.
"""

import sys

import pytest
import torch
from kernels.processes import python

from zonal.errors import PathError
from zonal.kernels import native as native_kernels
from zonal.kernels.mixer import (
    FAMILY,
    ConvolutionInputs,
    ConvolutionSpec,
    NormInputs,
    NormSpec,
    gated_norm,
    short_convolution,
)
from zonal.kernels.op import encode
from zonal.nn import GatedNorm, Mamba2, ShortConvolution, compiled

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture
def ran(monkeypatch):
    """The names of the compiled functions that are called."""
    called, load = [], native_kernels.load

    class Spied:
        def __getattr__(self, name):
            called.append(name)
            return getattr(load(FAMILY.code, FAMILY.source, FAMILY.isa()), name)

    monkeypatch.setattr(
        native_kernels,
        "load",
        lambda code, source="tile", isa=None: Spied() if source == FAMILY.source else load(code, source, isa),
    )
    return called


def twin(module):
    """The same module in float64, which torch runs."""
    other = type(module)(*module.made)
    other.load_state_dict(module.state_dict())
    return other.double()


def make(kind, *arguments):
    torch.manual_seed(0)
    module = kind(*arguments)
    module.made = arguments
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1, 1)
    return module


def gradients(outputs, inputs):
    torch.manual_seed(3)
    return torch.autograd.grad(
        torch.stack([(y * torch.randn(y.shape, dtype=torch.float64)).sum() for y in outputs]).sum(), inputs
    )


def compare(module, other, call, tensors):
    """Outputs and the gradients of tensors and parameters, in float32 by the kernel and in float64 by torch."""
    found = []
    for one, dtype in ((module, torch.float32), (other, torch.float64)):
        given = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
        outputs = call(one, *given)
        found.append((outputs, gradients(outputs, [x for x in (*given, *one.parameters()) if x is not None])))
    for ours, theirs in zip(found[0][0] + list(found[0][1]), found[1][0] + list(found[1][1]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


MASK = torch.arange(150).remainder(3).ne(1) & (torch.arange(150) < 140)
CASES = {
    "plain": ({}, False),
    "tail": ({}, True),
    "padded": ({"key_padding_mask": torch.stack([MASK, MASK.flip(0), torch.zeros(150, dtype=torch.bool)])}, False),
    "padded-tail": ({"key_padding_mask": torch.stack([MASK, ~MASK, torch.arange(150) < 1])}, True),
}


@pytest.mark.parametrize(
    ("case", "width", "activation", "bias"),
    [(case, 4, "silu", True) for case in CASES]
    + [
        ("padded-tail", 4, None, False),
        ("tail", 3, "silu", False),
        ("plain", 2, None, True),
        ("padded-tail", 7, "silu", True),
    ],
)
def test_convolution_is_that_of_float64(case, width, activation, bias, ran):
    options, tailed = CASES[case]
    module = make(ShortConvolution, 37, width, activation, bias)
    wide = torch.randn(3, 150, 64)
    tail = torch.randn(3, width - 1, 37) if tailed else None
    compare(module, twin(module), lambda m, x, t: list(m(x[:, :, 11:48], t, **options)), (wide, tail))
    assert ran == ["zonal_convolution_forward", "zonal_convolution_backward"]


@pytest.mark.parametrize("length", [2, 3, 127, 128, 131])
def test_convolution_at_the_borders_of_ranges(length):
    module = make(ShortConvolution, 8, 4, "silu", True)
    compare(module, twin(module), lambda m, x, t: list(m(x, t)), (torch.randn(2, length, 8), torch.randn(2, 3, 8)))


@pytest.mark.parametrize("lengths", [[150], [1, 1, 1, 147], [2, 124, 1, 3, 20], [1] * 40])
@pytest.mark.parametrize("width", [4, 6])
def test_packed_documents(lengths, width):
    module = make(ShortConvolution, 20, width, "silu", True)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    compare(module, twin(module), lambda m, x: list(m(x, cu_seqlens=edges)), (torch.randn(1, sum(lengths), 20),))


@pytest.mark.parametrize(("sizes", "heads"), [([24, 5, 8], 3), ([30, 7], 1), ([37], 37)])
def test_parts_are_those_of_the_whole(sizes, heads, ran):
    module = make(ShortConvolution, 37, 4, "silu", True)
    options = {"key_padding_mask": torch.stack([MASK, MASK.flip(0)])}
    compare(
        module, twin(module), lambda m, x: [*m.parts(x, sizes, heads=heads, **options)[0]], (torch.randn(2, 150, 37),)
    )
    x = torch.randn(2, 150, 37)
    first, *others = module.parts(x, sizes, heads=heads)[0]
    assert first.shape == (2, 150, heads, sizes[0] // heads)
    assert torch.equal(torch.cat([first.flatten(2), *others], dim=2), module(x)[0])
    # a part that nobody uses has no gradient, and the first's may lie head by head
    x.requires_grad_()
    wanted = torch.autograd.grad(module(x)[0][..., : sizes[0]].square().sum(), x)[0]
    found = torch.autograd.grad(
        module.parts(x, sizes, heads=heads)[0][0].transpose(1, 2).contiguous().square().sum(), x
    )[0]
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    assert ran


@pytest.mark.parametrize(("heads", "width", "groups"), [(4, 16, 1), (4, 16, 2), (3, 5, 5), (6, 10, 4), (1, 3, 3)])
@pytest.mark.parametrize("skips", [True, False])
def test_gated_norm_is_that_of_float64(heads, width, groups, skips, ran):
    module = make(GatedNorm, heads * width, groups, 1e-3)
    y, gate = torch.randn(2, heads, 150, width), torch.randn(2, 150, heads * width + 9)
    values, skip = (torch.randn(2, 150, heads, width), torch.randn(heads)) if skips else (None, None)

    def call(m, y, gate, values, skip):
        return [m(y.transpose(1, 2), gate[..., 9:], values=values, skip=skip)]

    compare(module, twin(module), call, (y, gate, values, skip))
    assert ran == ["zonal_gated_forward", "zonal_gated_backward"]


def test_numbers_far_out_stay_numbers():
    module = make(ShortConvolution, 16, 4, "silu", True)
    norm = make(GatedNorm, 16, 1)
    x = torch.randn(1, 20, 16) * 150
    compare(module, twin(module), lambda m, x: [m(x)[0]], (x,))
    compare(norm, twin(norm), lambda m, y, z: [m(y, z)], (x.unflatten(2, (4, 4)) / 150, x))
    x[0, 10, 3] = float("nan")
    y = module(x)[0]
    assert y[0, 10:14, 3].isnan().all()
    assert y.isnan().sum() == 4


@pytest.mark.parametrize(
    "options", [{}, {"key_padding_mask": torch.stack([MASK, MASK.flip(0)])}], ids=["plain", "padded"]
)
def test_a_layer_without_kernels_is_the_same(options, monkeypatch, ran):
    torch.manual_seed(0)
    layer, x = Mamba2(32, state=8, head_dim=16, groups=2), torch.randn(2, 150, 32)
    found = []
    for setting in ("on", "off"):
        monkeypatch.setenv("ZONAL_KERNELS", setting)
        given = x.clone().requires_grad_()
        y, memory = layer(given, return_memory=True, path="dense", **options)
        found.append((y, memory.tail, *gradients([y], [given, *layer.parameters()])))
    assert len([name for name in ran if "forward" in name]) == 2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_what_is_refused_says_why(monkeypatch):
    assert "float32" in str(compiled.refusal(torch.zeros(1, dtype=torch.float64)))
    assert compiled.refusal(torch.zeros(1), None) is None
    monkeypatch.setenv("ZONAL_KERNELS", "off")
    assert "ZONAL_KERNELS=off" in str(compiled.refusal(torch.zeros(1)))


def test_operators_are_torchs_own_kind():
    x, taps = torch.randn(2, 9, 13, requires_grad=True), torch.randn(13, 4, requires_grad=True)
    tail, bias = torch.randn(2, 3, 13, requires_grad=True), torch.randn(13, requires_grad=True)
    for inputs, spec in (
        (ConvolutionInputs(x, tail, taps, bias), ConvolutionSpec(True, 2, (8, 2, 3))),
        (
            ConvolutionInputs(x, None, taps, None, reach=torch.arange(9, dtype=torch.int32)),
            ConvolutionSpec(False, 1, (13,)),
        ),
    ):
        torch.library.opcheck(short_convolution.operator, (*inputs, encode(spec)))
    y, v, z = (
        torch.randn(2, 9, 3, 4, requires_grad=True),
        torch.randn(2, 9, 3, 4, requires_grad=True),
        torch.randn(2, 9, 12, requires_grad=True),
    )
    skip, gain = torch.randn(3, requires_grad=True), torch.randn(12, requires_grad=True)
    for inputs, groups in ((NormInputs(y, v, z, skip, gain), 2), (NormInputs(y, None, z, None, gain), 1)):
        torch.library.opcheck(gated_norm.operator, (*inputs, encode(NormSpec(groups, 1e-5))))


def test_second_derivatives_are_refused():
    module, norm = make(ShortConvolution, 4, 4, "silu"), make(GatedNorm, 4)
    x = torch.randn(1, 5, 4, requires_grad=True)
    for y in (module(x)[0], norm(x.unflatten(2, (2, 2)), x)):
        with pytest.raises(PathError, match="ZONAL_KERNELS=off"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.skipif(sys.platform != "linux", reason="its limit of memory")
def test_memory_that_runs_out_is_an_error(tmp_path):
    """In a process whose memory holds the gradients of a row, but not what they are made in."""
    code = (
        "import resource, torch\n"
        "from zonal.kernels.mixer import NormInputs, NormSpec, _norm_backward\n"
        "def back(width):\n"
        "    y, z = torch.ones(1, 1, 1, width), torch.ones(1, 1, width)\n"
        "    inputs = NormInputs(y, None, z, None, z[0, 0])\n"
        "    return lambda: _norm_backward((z,), inputs, (z,), NormSpec(1, 1e-5), set())\n"
        "back(8)()\n"
        "large = back(1 << 22)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))\n"
        "large()"
    )
    done = python("-c", code, interpret=False, cache=tmp_path)
    assert "MemoryError: nn: the CPU kernel could not allocate its buffers" in done.stderr, done.stderr[-2000:]


def test_a_fault_in_the_kernel_is_found(monkeypatch):
    """Taps the wrong way round: the comparison above must see it."""
    body = short_convolution.bodies["cpu"]
    original = body.forward
    monkeypatch.setattr(body, "forward", lambda inputs, spec: original(inputs._replace(taps=inputs.taps.flip(1)), spec))
    module = make(ShortConvolution, 8, 4, "silu", True)
    with pytest.raises(AssertionError, match="not close"):
        compare(module, twin(module), lambda m, x: [m(x)[0]], (torch.randn(1, 40, 8),))
