"""Tasks to train and measure on: associative recall, retrieval, small programs, hierarchies, relations, signals,
pictures and language modelling. Tasks are found by ``resolve``.
"""

from zonal.tasks.algorithmic import Algorithmic
from zonal.tasks.expressions import Expressions
from zonal.tasks.glosses import Glosses
from zonal.tasks.grid import Retrieval, Shape, Stage, grid
from zonal.tasks.lookup import Lookup
from zonal.tasks.masked import MaskedText
from zonal.tasks.mqar import MQAR, Segment, multiquery_ar
from zonal.tasks.periodic import Periodic
from zonal.tasks.pixels import Pixels
from zonal.tasks.registry import checked_config, from_config, kind_of, names, resolve, restored
from zonal.tasks.relations import Ancestors, Paths
from zonal.tasks.settings import TaskSettings
from zonal.tasks.task import IGNORED, Batch, Examined, Guess, Task
from zonal.tasks.text import Text

__all__ = [
    "IGNORED",
    "MQAR",
    "Algorithmic",
    "Ancestors",
    "Batch",
    "Examined",
    "Expressions",
    "Glosses",
    "Guess",
    "Lookup",
    "MaskedText",
    "Paths",
    "Periodic",
    "Pixels",
    "Retrieval",
    "Segment",
    "Shape",
    "Stage",
    "Task",
    "TaskSettings",
    "Text",
    "checked_config",
    "from_config",
    "grid",
    "kind_of",
    "multiquery_ar",
    "names",
    "resolve",
    "restored",
]  # fmt: skip
