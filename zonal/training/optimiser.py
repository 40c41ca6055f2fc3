"""AdamW with two groups of parameters: those that decay and those that do not.

Weight decay pulls towards zero what a matrix multiplication uses: weights of at least two dimensions. It is left off

* vectors and scalars (norm gains, biases): zero is not a neutral value for a gain;
* parameters of an attention operator (degrees, ridge, gates), whatever their shape: they are coordinates of a kernel,
  one row a head, and zero is no simpler kernel;
* numbers of a layer's own, such as Mamba-3's biases of keys and MesaNet's ridge, for the same reasons;
* embedding tables, tied to the head or not: rows of rare tokens get no gradient and would only shrink, and with
  pre-norm blocks small embeddings blow up the gradients of the first layers;
* gates of a dense skip, a row a record: the last record's are neutral at 1.
"""

import torch
from torch import nn
from torch.optim import AdamW

from zonal.algebra import Operator
from zonal.nn import DenseSkip
from zonal.nn.mixer import TokenMixer


def decay_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """(decaying, not decaying) parameters of ``model`` by qualified name; shared ones once, frozen ones left out."""
    exempt: set[int] = set()
    for module in model.modules():
        if isinstance(module, Operator | nn.Embedding | DenseSkip):
            exempt.update(id(parameter) for parameter in module.parameters())
        elif isinstance(module, TokenMixer):
            exempt.update(id(parameter) for parameter in module.parameters(recurse=False))
    decaying: dict[str, nn.Parameter] = {}
    constant: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decaying if parameter.ndim >= 2 and id(parameter) not in exempt else constant)[name] = parameter
    return decaying, constant


def adamw(model: nn.Module, *, weight_decay: float, betas: tuple[float, float]) -> AdamW:
    """AdamW over ``decay_groups(model)``. The learning rate is set before each update by ``set_learning_rate``."""
    decaying, constant = decay_groups(model)
    groups = [
        {"params": list(decaying.values()), "weight_decay": weight_decay},
        {"params": list(constant.values()), "weight_decay": 0.0},
    ]
    # fused: one kernel for all parameters; on two cores it takes a fifth of the time of the loop over parameters
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the same learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate
