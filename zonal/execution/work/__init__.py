"""The work of each route for a call (``Work``), counted from its shape alone.

Each formula counts multiply-adds (including backward when gradients flow), bytes read and written, torch calls or
kernel launches, and the most bytes in use at once beyond the inputs. Elementwise operations of torch are counted by the
bytes that they move. Those of compiled kernels stay in registers, and are counted in multiply-adds.
"""

from zonal.execution.work.common import Work
from zonal.execution.work.pairs import (
    compiled_tiles,
    dense,
    distances,
    plan_compiled,
    plan_tiles,
    tiles,
    tree,
)
from zonal.execution.work.ridge import compiled_ridge, ridge
from zonal.execution.work.steps import (
    candidates,
    compiled_candidates,
    compiled_ridge_steps,
    compiled_steps,
    compiled_window_steps,
    steps,
)
from zonal.execution.work.sums import compiled_sums, compiled_window, sums, window

__all__ = [
    "Work", "candidates", "compiled_candidates", "compiled_ridge", "compiled_ridge_steps", "compiled_steps",
    "compiled_sums", "compiled_tiles", "compiled_window", "compiled_window_steps", "dense", "distances",
    "plan_compiled", "plan_tiles", "ridge", "steps", "sums", "tiles", "tree", "window",
]  # fmt: skip
