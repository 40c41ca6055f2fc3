"""Training: resumable runs, and comparisons of operators."""

from zonal.training.checkpoint import load_model
from zonal.training.compare import Comparison, ComparisonResult
from zonal.training.config import TrainConfig
from zonal.training.environment import interruptible
from zonal.training.joining import join
from zonal.training.loop import train
from zonal.training.record import RunResult
from zonal.training.sharded import several_processes
from zonal.training.spec import ComparisonSpec

__all__ = [
    "Comparison",
    "ComparisonResult",
    "ComparisonSpec",
    "RunResult",
    "TrainConfig",
    "interruptible",
    "join",
    "load_model",
    "several_processes",
    "train",
]
