"""What an experiment of a paper, or a recipe from a file, is to the commands."""

from collections.abc import Mapping
from dataclasses import dataclass

from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.report.published import Published


@dataclass(frozen=True)
class Preset:
    """about: one line. models: label → spec of the model's layers. The rest are options of the commands; ``zonal train`` takes the first model and rate."""

    about: str
    models: Mapping[str, str]
    seeds: str
    learning_rates: str
    task: TaskOptions
    model: ModelOptions
    training: TrainingOptions
    published: Published | None = None

    @property
    def operators(self) -> str:
        return ",".join(self.models.values())

    @property
    def labels(self) -> dict[str, str]:
        """Names for people, by spec."""
        return {spec: label for label, spec in self.models.items()}
