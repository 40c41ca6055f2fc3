"""Adding a route takes two files: itself, and its row in the table. Done in a copy, on which a suite then runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
SUITE = """
import torch, zonal
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
print("good")
"""


def test_a_route_takes_two_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "zonal", tmp_path / "zonal")  # with the bytecode, which takes seconds to make again
    execution = tmp_path / "zonal" / "execution"
    (execution / "paths" / "fused.py").write_text(ROUTE, encoding="utf-8")
    table = (execution / "routes.py").read_text(encoding="utf-8")
    row = '    Route("tiled", "torch fused", fused.refusal, fused.work, _whole(fused.run), 10 * _TORCH, "sums"),\n'
    above = '    Route("tiled", "torch", '
    assert table.count(above) == 1
    table = table.replace(above, row + above).replace("    distance,\n", "    distance,\n    fused,\n", 1)
    (execution / "routes.py").write_text(table, encoding="utf-8")
    surroundings = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SUITE], cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "good", done.stderr[-3000:]
