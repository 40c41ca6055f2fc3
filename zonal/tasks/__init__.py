"""Tasks to train and measure on: associative recall, retrieval and language modelling. Tasks are found by ``resolve``."""

from zonal.tasks.grid import Retrieval, Shape, Stage, grid
from zonal.tasks.mqar import MQAR, Segment, multiquery_ar
from zonal.tasks.registry import from_config, names, resolve
from zonal.tasks.task import IGNORED, Batch, Task
from zonal.tasks.text import Text

__all__ = ["IGNORED", "MQAR", "Batch", "Retrieval", "Segment", "Shape", "Stage", "Task", "Text", "from_config", "grid", "multiquery_ar", "names", "resolve"]
