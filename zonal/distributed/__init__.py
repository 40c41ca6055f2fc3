"""Several processes that hold stretches of the same sequences (``torch.distributed``)."""

from zonal.distributed.sequence import SequenceParallel, sequence_parallel

__all__ = ["SequenceParallel", "sequence_parallel"]
