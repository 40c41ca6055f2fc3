"""``zonal.plan``: a plan runs what it was made for, reads what was learned at each call, and refuses anything else."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError, PathError
from zonal.execution import plan as planner
from zonal.kernels import native as native_kernels

SPECS = ["softmax", "sko", "squared_affine", "ska(power=1)", "ridge", "retention", "rewa"]


def draw(tokens: int = 40, dim: int = 12, gradients: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, tokens, dim), (2, 2, tokens, dim), (2, 2, tokens, dim))
    return tuple(torch.randn(shape, generator=generator).requires_grad_(gradients) for shape in shapes)


def made(spec: str, gradients: bool = False, path: str = "auto") -> tuple[zonal.Plan, tuple[torch.Tensor, ...]]:
    q, k, v = draw(gradients=gradients)
    operator = m.resolve(spec)
    return zonal.plan(operator, q.shape, k.shape, causal=True, gradients=gradients, path=path), (q, k, v)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_plan_runs_what_attention_runs(spec: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_kernels.VARIABLE, kernels)
    plan, (q, k, v) = made(spec)
    for scale in (1.0, 0.5):  # the second call goes by what the first one left
        got = plan(q * scale, k, v)
        assert torch.equal(got, zonal.attention(q * scale, k, v, plan.operator, causal=True, path=plan.path))


@pytest.mark.parametrize("spec", [*SPECS, "linear"])
@torch.no_grad()
def test_one_head_of_queries_and_keys_serves_all_values_in_a_plan_too(spec: str) -> None:
    """The plan refused the shapes that it was made for."""
    shapes = (2, 1, 40, 12), (2, 1, 40, 12), (2, 4, 40, 6)
    plan = zonal.plan(spec, *shapes, causal=True, gradients=False)
    for _ in range(2):
        tensors = [torch.randn(shape) for shape in shapes]
        assert torch.equal(plan(*tensors), zonal.attention(*tensors, plan.operator, causal=True, path=plan.path))


@pytest.mark.parametrize("spec", ["squared_affine", "ska(power=1)"])
@torch.no_grad()
def test_a_plan_keeps_no_tokens(spec: str) -> None:
    plan, tensors = made(spec, path="chunked")
    plan(*tensors)
    plan(*tensors)
    left = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [x() for x in left] == [None] * 3


def test_nothing_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, tensors = made("softmax")
    real, times = planner.asked, []

    def counted(*arguments: Any) -> Any:
        times.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(planner, "asked", counted)
    with torch.no_grad():
        got = plan(*tensors)
        assert not times
        assert torch.equal(got, zonal.attention(*tensors, plan.operator, causal=True))
    assert times  # attention does ask


@pytest.mark.parametrize("spec", ["sko(degrees=(2.0,))", "ska(power=1)"])
@torch.no_grad()
def test_what_was_learned_is_read_at_each_call(spec: str) -> None:
    """Also what was written through ``.data``, which changes no version."""
    plan, tensors = made(spec, path="chunked")
    before = [plan(*tensors) for _ in range(2)][1]
    for parameter in plan.operator.parameters():
        parameter.data.add_(0.5)
    after = plan(*tensors)
    expected = zonal.attention(*tensors, plan.operator, causal=True, path="dense")
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-4)
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_flow(spec: str) -> None:
    plan, tensors = made(spec, gradients=True)
    wanted = [*tensors, *plan.operator.parameters()]
    y = plan(*tensors)
    expected = zonal.attention(*tensors, plan.operator, causal=True, path=plan.path)
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), wanted, allow_unused=True),
        torch.autograd.grad(expected.square().sum(), wanted, allow_unused=True),
        strict=True,
    ):
        assert (a is None and b is None) or torch.equal(a, b)


def test_transforms_meet_the_refusals_of_attention() -> None:
    many = [torch.stack([x, x]) for x in draw()]
    plan, _ = made("softmax", path="streaming")
    with pytest.raises(PathError, match=r"path 'streaming' cannot run.*torch\.func"):
        torch.func.vmap(plan)(*many)


@pytest.mark.parametrize(("spec", "path"), [("softmax", "tiled"), ("squared_affine", "chunked"), ("sko", "dense")])
@torch.no_grad()
def test_tangents_go_forward_through_a_plan_or_are_refused(spec: str, path: str) -> None:
    plan, (q, k, v) = made(spec, path=path)
    plan(q, k, v)  # may leave a kernel
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        if path != "dense":
            with pytest.raises(PathError, match=r"no forward-mode derivative\. Use path='dense'"):
                plan(dual, k, v)
        else:
            assert forward_ad.unpack_dual(plan(dual, k, v)).tangent is not None


def test_what_it_was_not_made_for_is_refused() -> None:
    plan, (q, k, v) = made("softmax")
    for tensors, said in (
        ((q[:, :, 1:], k, v), r"q must be torch.float32 of shape \(2, 4, 40, 12\)"),
        ((q.double(), k.double(), v.double()), "received torch.float64"),
        ((q.to("meta"), k.to("meta"), v.to("meta")), "on meta"),
        ((q.requires_grad_(), k, v), "made without them"),
    ):
        with pytest.raises(ArgumentError, match=said):
            plan(*tensors)
    mask = torch.ones(2, 40, dtype=torch.bool)
    with pytest.raises(ArgumentError, match="without a key_padding_mask"):
        plan(q.detach(), k, v, key_padding_mask=mask)
    masked = zonal.plan("softmax", q.shape, k.shape, causal=True, gradients=False, key_padding=True)
    assert masked(q.detach(), k, v, key_padding_mask=mask).shape == q.shape
    with pytest.raises(ArgumentError, match="with a key_padding_mask"):
        masked(q.detach(), k, v)
    with pytest.raises(PathError, match="no finite feature map"):
        zonal.plan("softmax", q.shape, k.shape, causal=True, path="chunked")


def test_an_operator_that_has_moved_is_refused() -> None:
    plan, tensors = made("ska(power=1)")
    decoder = zonal.Memory.empty(plan.operator, 2, 2, 12, 12).decoder()
    token = [x[:, :, :1] for x in tensors]
    with torch.no_grad():
        plan(*tensors), decoder.step(*token)
        plan.operator.to("meta")
        for call, run in (("plan", lambda: plan(*tensors)), ("Decoder.step", lambda: decoder.step(*token))):
            with pytest.raises(ArgumentError, match=rf"^{call}: operator 'ska' was on cpu .* is on meta now\. Move it"):
                run()


def test_arguments_that_are_no_tensors_or_have_other_names_are_refused() -> None:
    plan, (q, k, v) = made("softmax")
    decoder = zonal.Memory.empty(plan.operator, 2, 2, 12, 12).decoder()
    for call, run in (
        ("plan", plan),
        ("Decoder.step", decoder.step),
        ("attention", lambda *x: zonal.attention(*x, "softmax")),
    ):
        with pytest.raises(ArgumentError, match=rf"^{call}: k must be a torch.Tensor, received list"):
            run(q, k.tolist(), v)
    with pytest.raises(ArgumentError, match=r"Decoder.step: there is no argument 'attention_mask'"):
        decoder.step(q, k, v, attention_mask=None)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"Plan.__call__: there is no argument 'mask'.*key_padding_mask"):
        plan(q, k, v, mask=None)  # type: ignore[call-arg]


@torch.no_grad()
def test_what_is_no_tensor_is_refused_by_a_kernel_that_is_kept_too() -> None:
    """A plan and a decoder that had run before ended in an AttributeError."""
    plan, (q, k, v) = made("squared_affine", path="chunked")
    decoder = zonal.Memory.empty(plan.operator, 2, 2, 12, 12).decoder()
    token = [x[:, :, :1] for x in (q, k, v)]
    plan(q, k, v)
    decoder.step(*token)
    for run, tensors in ((plan, [q, k, v]), (decoder.step, token)):
        for place in range(3):
            for wrong in (None, [1.0]):
                with pytest.raises(ArgumentError, match=rf": {'qkv'[place]} must be a torch.Tensor, received "):
                    run(*tensors[:place], wrong, *tensors[place + 1 :])


def test_it_says_what_explain_says() -> None:
    plan, (q, k, _) = made("sko")
    assert str(plan) == str(zonal.explain("sko", q.shape, k.shape, causal=True))
    assert plan.path in repr(plan)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_plan_that_has_run_and_been_printed_is_copied_and_pickled(spec: str) -> None:
    plan, tensors = made(spec)
    y, text = plan(*tensors), str(plan)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert (str(other), other.operator is plan.operator) == (text, False)
        assert torch.equal(other(*tensors), y)


# torch's tracer warns of itself where it meets an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("spec", ["softmax", "sko", "ska(power=1)", "retention"])
def test_a_plan_is_one_graph(spec: str) -> None:
    plan, tensors = made(spec, gradients=True)
    compiled = torch.compile(plan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), plan(*tensors), rtol=1e-4, atol=1e-5)


class Attends(torch.nn.Module):
    """What torch.export takes: a module."""

    def __init__(self, operator: zonal.Operator, plan: zonal.Plan | None) -> None:
        super().__init__()
        self.operator, self.plan = operator, plan

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return zonal.attention(q, k, v, self.operator, causal=True) if self.plan is None else self.plan(q, k, v)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("spec", ["softmax", "sko", "ska(power=1)"])
@torch.no_grad()
def test_calls_and_plans_are_exported(spec: str, planned: bool) -> None:
    plan, tensors = made(spec)
    module = Attends(plan.operator, plan if planned else None)
    exported = torch.export.export(module, tensors, strict=True).module()
    torch.testing.assert_close(exported(*tensors), module(*tensors), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_any_number_of_tokens_is_exported() -> None:
    """A plain call; a plan is for one shape."""
    operator, tensors = m.softmax(), draw()
    tokens = torch.export.Dim("tokens", min=4, max=4096)
    exported = torch.export.export(
        Attends(operator, None), tensors, strict=True, dynamic_shapes=[{2: tokens}, {2: tokens}, {2: tokens}]
    ).module()
    for length in (17, 333):
        other = draw(length)
        expected = zonal.attention(*other, operator, causal=True)
        torch.testing.assert_close(exported(*other), expected, rtol=1e-4, atol=1e-5)
