"""What tests of several tasks ask of batches."""

import torch

from zonal.tasks import Batch


def same(left: Batch, right: Batch) -> bool:
    return (
        torch.equal(left.tokens, right.tokens)
        and torch.equal(left.targets, right.targets)
        and left.slices == right.slices
    )
