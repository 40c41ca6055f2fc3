"""Adding to the library: a mechanism takes three files, a link, a task and a route two each. A copy is run with all of
them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = '''"""The square of one plus the score."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import Move
from zonal.algebra.link.base import Link
from zonal.formula import Formula


@dataclass(frozen=True)
class Bump(Link):
    """l(x) = (1 + x)^2."""

    positive = True
    degree = 2
    formula = Formula("bump", "(1.f + x) * (1.f + x)", "2.f * (1.f + x)")

    def indefinite_reason(self, unit: bool, dim: int | None) -> None:
        return None

    def monomials(self, c: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64, device=c.device).view(3, 1, 1, 1)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return (1 + x).square()

    def moves(self) -> tuple[Move, ...]:
        return (self.move("restriction", "bump", "evidence is (1 + x)^2"),)
'''
MECHANISM = '''"""Bell attention: K = exp(3 cos(q, k)), rows divided by their sum."""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism("Bell", "a sharp cosine.", weights="$e^{3 x}$ over row sum", memory="$S(D + P)$", paths="tiled")
def bell() -> Operator:
    """exp(3 cos(q, k)), row-normalised."""
    return Operator(Cosine(temperature=1 / 3, learn_temperature=False), Exp(), Row(), name="bell")
'''
TASK = '''"""Say a sequence again."""

from zonal.tasks.mqar import MQAR


class Echoed(MQAR):
    """Associative recall under another name."""
'''
SUITE = """
import torch, zonal
from matrix import CASES, OPERATORS, inputs, paths
from tools import pages
from zonal import link, mechanisms, tasks
from zonal.algebra.declaration import declared
from zonal.cli.app import main
from zonal.formula import FORMULAS
from zonal.report import style

assert "Bump" in declared("link") and isinstance(mechanisms.regime(score="cosine", link="bump").link, link.Bump)
assert "bump" in FORMULAS  # a wheel carries it compiled
assert "bell" in mechanisms.names() and style.label("bell") == "Bell" and style.explanation("bell") == "a sharp cosine."
assert "(mechanisms/bell.md)" in pages.operators("| operator | weights | memory | fast paths |\\n|---|---|---|---|\\n")
assert zonal.Memory.empty(OPERATORS["bump"](), batch=1, heads=2, key_dim=5, value_dim=5).kind == "features"
case = CASES["causal-gqa-odd"]
for name in ("bell", "bump"):
    operator = OPERATORS[name]().double()
    assert zonal.Operator.from_config(operator.config()).config() == operator.config()
    for path in ("dense", *paths(name, case)):
        data = inputs(case)
        found = [y := data.run(operator, path), *torch.autograd.grad(y.square().sum(), data.leaves)]
        exact = found if path == "dense" else exact
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b)
assert "echoed" in tasks.names() and tasks.resolve("echoed").train_batch(0, 2, 0).tokens.shape[0] == 2
assert main(["explain", "--operator", "bell", "--shape", "1,2,64,16"]) == 0
"""
ROUTE = '''"""Row attention by torch's own function, for plain dot products without masks."""

import torch

from zonal.execution.call import Call
from zonal.execution.shape import Shape
from zonal.execution.work import Work, compiled_tiles


def refusal(call: Call) -> str | None:
    """Why it cannot run a call, or None."""
    plain = call.tags.reduction == "row" and call.tags.log_space and call.tags.bilinear and not call.biased
    if not plain or call.visibility.key_mask is not None or call.window is not None or call.visibility.packed:
        return "it is for softmax of dot products without masks; use another route"
    return None


def work(s: Shape) -> Work:
    """What it does."""
    return compiled_tiles(s)._replace(launches=1)


def run(call: Call) -> torch.Tensor:
    """y (B, H, T, P)."""
    seen = call.visibility.tile(0, call.q.shape[2], 0, call.k.shape[2], call.q.device)
    k, v = call.expand(call.k), call.expand(call.v)
    y = torch.nn.functional.scaled_dot_product_attention(call.q, k, v, attn_mask=seen, scale=1.0)
    return call.scaled(y)
'''
ROW = '    Route("tiled", "torch fused", fused.refusal, fused.work, _whole(fused.run), 10 * _TORCH, "sums"),\n'
ROUTE_SUITE = """
from zonal.execution.routes import ROUTES

route = next(route for route in ROUTES if route.name == "torch fused")
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
for causal in (False, True):
    page = zonal.explain("softmax", q.shape, causal=causal, dtype=torch.float64)
    assert "torch fused" in str(page), page  # explain lists it
    assert page.plan.routes[0] is route, page  # the planner takes it
    plan = zonal.plan("softmax", q.shape, causal=causal, dtype=torch.float64, gradients=True)
    expected = zonal.attention(q, k, v, "softmax", causal=causal, path="dense")
    for y in (plan(q, k, v), zonal.attention(q, k, v, "softmax", causal=causal)):
        torch.testing.assert_close(y, expected)
        wanted = torch.autograd.grad(expected.sum(), [q, k, v], retain_graph=True)
        for a, b in zip(torch.autograd.grad(y.sum(), [q, k, v]), wanted):
            torch.testing.assert_close(a, b)
assert zonal.explain("sko", q.shape, dtype=torch.float64).plan.routes[0] is not route  # it is refused with its reason
assert "without masks" in str(zonal.explain("sko", q.shape, dtype=torch.float64).plan.found.without)
"""


def put(root: Path, path: str, text: str) -> str:
    """A new file; its path."""
    assert not (root / path).exists()
    (root / path).write_text(text, encoding="utf-8")
    return path


def put_in(root: Path, path: str, *edits: tuple[str, str]) -> str:
    """Lines put in front of lines of a file; its path."""
    text = (root / path).read_text(encoding="utf-8")
    for before, line in edits:
        assert text.count(before) >= 1, (path, before)
        text = text.replace(before, line + before, 1)
    (root / path).write_text(text, encoding="utf-8")
    return path


def test_a_mechanism_a_link_a_task_and_a_route(tmp_path: Path) -> None:
    for folder in ("zonal", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with the bytecode, which takes seconds to make again
    (tmp_path / "docs" / "mechanisms").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in ("matrix.py", "pairwise.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    row, runs = '    "cosine": m.cosine,\n', '"sko-chebyshev",'
    mechanism = {
        put(tmp_path, "zonal/mechanisms/bell.py", MECHANISM),
        put_in(tmp_path, "tests/matrix.py", (row, '    "bell": m.bell,\n'), (runs, '"bell", ')),
        put(tmp_path, "docs/mechanisms/bell.md", "# Bell attention\n"),
    }
    assert len(mechanism) == 3
    made = '    "bump": lambda: Operator(score.Cosine(), link.Bump(), anchor.Row()),\n'
    added = {
        put(tmp_path, "zonal/algebra/link/bump.py", LINK),
        put_in(tmp_path, "tests/matrix.py", (row, made), ('"linear", "retention"', '"bump", ')),
    }
    assert len(added) == 2
    # few sequences: all are drawn at the first batch
    entry = '    "echoed": _Entry("say it again", (), lambda name, given: Echoed(64, length=16, train_examples=8)),\n'
    task = {
        put(tmp_path, "zonal/tasks/echoed.py", TASK),
        put_in(
            tmp_path,
            "zonal/tasks/registry.py",
            ("from zonal.tasks.expressions import", "from zonal.tasks.echoed import Echoed\n"),
            ('    "mqar": _Entry(', entry),
        ),
    }
    assert len(task) == 2
    route = {
        put(tmp_path, "zonal/execution/paths/fused.py", ROUTE),
        put_in(
            tmp_path,
            "zonal/execution/routes.py",
            ('    Route("tiled", "torch", ', ROW),
            ("    distance,\n", "    fused,\n"),
        ),
    }
    assert len(route) == 2
    done = subprocess.run(
        [sys.executable, "-c", f"{SUITE}{ROUTE_SUITE}print('good')"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("good"), done.stderr[-3000:]
