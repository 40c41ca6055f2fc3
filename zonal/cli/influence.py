"""``zonal influence``: which inputs of a stack of layers can reach which outputs, and through how few layers."""

import itertools
import json
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.text import Text
from torch import Tensor

from zonal.cli.console import screen, table
from zonal.cli.options import shown
from zonal.errors import ArgumentError
from zonal.limits import Between
from zonal.models import CausalLM, ModelConfig, layer_list
from zonal.theory import influence

DESCRIPTION = """\
Print which inputs can influence which outputs of a causal model, and the least number of layers that this takes. A
single operator is repeated until more layers add nothing; a list is used as given. Inputs outside the printed range
cannot matter, whatever the weights. Inputs inside it need not matter.

Examples:
  zonal influence --window 64 --tokens 512
  zonal influence --operator "regime(prior=('window(left=16)',))*3, softmax" --conv 4
  zonal influence --operator "regime(prior=('chunk_causal(size=32)',))" --json"""

_CELLS = 16
_ROWS = 12
# among so many heads every mixture of up to six parts can share; nothing of this size is allocated
_HEADS = 60


@dataclass(frozen=True)
class Influence:
    """Say which inputs can reach which outputs."""

    operator: str = "softmax"
    """One operator or recurrence, which is repeated, or a list with one per layer; NAME*3 stands for three."""
    window: Annotated[int | None, Between(0, 4096), shown("INT", "default: none")] = None
    """In place of an operator: softmax with a window of this many tokens."""
    conv: Annotated[int, Between(0, 4096)] = 0
    """Width of the short convolution before the projections of attention; 0 for none."""
    tokens: Annotated[int, Between(1, 4096)] = 256
    """Tokens of a sequence."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class Found:
    """depths: as ``influence.depth`` has them. repeated: of one layer again and again."""

    depths: Tensor
    repeated: bool

    @property
    def layers(self) -> int:
        """From so many on, more bring nothing."""
        return int(self.depths.max())

    def reached(self, layers: int) -> tuple[float, int]:
        """Of the pairs of a token and an earlier one the part that so many layers join, and how far back the last token
        sees.
        """
        joined = (self.depths >= 0) & (self.depths <= layers)
        tokens = len(joined)
        earlier = tokens * (tokens - 1) // 2
        share = int(joined.tril(-1).sum()) / earlier if earlier else 1.0
        return share, tokens - 1 - int(joined[-1].nonzero().min())

    def picture(self) -> list[str]:
        """Blocks of tokens as cells: the most layers that a pair in a cell needs; a dot where some pair is out of
        reach, nothing where all are later.
        """
        tokens = len(self.depths)
        edges = [tokens * index // min(_CELLS, tokens) for index in range(min(_CELLS, tokens) + 1)]
        width = len(str(self.layers))
        lines = []
        for row, (top, bottom) in enumerate(itertools.pairwise(edges)):
            cells = []
            for left, right in itertools.pairwise(edges[: row + 2]):
                block = self.depths[top:bottom, left:right]
                pairs = block[torch.arange(top, bottom)[:, None] >= torch.arange(left, right)]
                cells.append("·" if bool((pairs == influence.NEVER).any()) else str(int(pairs.max())))
            lines.append(f"{top:>{len(str(tokens))}}  " + " ".join(cell.rjust(width) for cell in cells))
        return lines


def found(options: Influence) -> Found:
    """What the options ask for. Raises: ArgumentError for what does not fit."""
    spec = options.operator
    if options.window is not None:
        if options.operator != Influence.operator:
            raise ArgumentError(
                "influence: --window replaces --operator, received both. "
                f"Leave one out, or give {options.operator!r} a prior of its own."
            )
        spec = f"regime(prior=('window(left={options.window})',))"
    layers = layer_list(spec, "--operator")
    with torch.device("meta"):
        model = CausalLM(ModelConfig(1, 128, layers, heads=_HEADS, head_dim=32, mlp="none", conv=options.conv))
    reads = model.reads(options.tokens)
    return Found(influence.depth(reads[0] if len(reads) == 1 else [*reads]), len(reads) == 1)


def run(options: Influence, command: str) -> int:
    """Run the command; returns the exit code."""
    result = found(options)
    counts = range(1, result.layers + 1)
    if options.json:
        rows = [{"layers": n, "pairs": share, "back": back} for n in counts for share, back in (result.reached(n),)]
        print(json.dumps({"tokens": options.tokens, "layers": result.layers, "reached": rows}, indent=1))
        return 0
    shown = [n for n in counts if n <= _ROWS - 1 or n == result.layers]
    rows = [(f"{n:,}", f"{share:.1%}", f"{back:,}") for n in shown for share, back in (result.reached(n),)]
    console = screen()
    more = "more of them bring nothing" if result.repeated else "all of them"
    head = ("layers", "pairs that they join", "how far the last token sees back")
    console.print(table(f"{options.tokens:,} tokens", head, rows))
    console.print(Text(f"{result.layers:,} layer{'s' if result.layers != 1 else ''}: {more}", style="dim"))
    legend = "rows for outputs, columns for inputs; a dot where some pair is out of reach"
    console.print(Text(f"\nMost layers that a pair needs, {legend}", style="dim"))
    for line in result.picture():
        console.print(Text(line))
    return 0
