"""Hugging Face data sets as a source of text, by the optional package ``datasets``; rows are streamed, one document
each.

    hub:<name>[@<subset>][:<split>[:<column>]]      hub:HuggingFaceFW/fineweb-edu@sample-10BT:train:text

``name`` is a data set of the hub or a local folder of JSON, Parquet, CSV or text files. The split is "train" unless
stated; the column is "text" if there is one, else the only column of strings. No code of a data set is ever run. What
was prepared is found again by the revision of the data set (for a local folder: its files and their times), which needs
the hub to answer; to work without it, keep the result of ``zonal.data.pretokenise``.
"""

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zonal.data.source import Source, pieces
from zonal.errors import ArgumentError, FileFormatError, ZonalError

HUB = "hub:"


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ArgumentError(
            f"text source: {HUB}… needs the package 'datasets', which is not installed. "
            "Install it with: pip install datasets"
        ) from error


@dataclass(frozen=True)
class HubDataset(Source):
    """One split of a data set. Made by ``parse``."""

    name: str
    subset: str | None = None
    split: str = "train"
    column: str | None = None

    @classmethod
    def parse(cls, spec: str) -> "HubDataset":
        """Raises: ArgumentError when ``spec`` has not the form above."""
        parts = spec.removeprefix(HUB).split(":")
        name, _, subset = parts[0].partition("@")
        if not name or len(parts) > 3 or not all(parts) or parts[0].endswith("@"):
            raise ArgumentError(
                f"text source: {spec!r} is not understood; required: hub:<name>[@<subset>][:<split>[:<column>]]."
            )
        return cls(name, subset or None, *parts[1:])

    @property
    def spec(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        subset = f"@{self.subset}" if self.subset else ""
        return f"{HUB}{self.name}{subset}:{self.split}" + (f":{self.column}" if self.column else "")

    @property
    def title(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.spec

    def fingerprint(self) -> str:
        library = _library()
        try:
            revision = library.load_dataset_builder(self.name, self.subset).hash
        except (OSError, ValueError) as error:
            raise self._unavailable(error) from error
        return hashlib.sha256(
            json.dumps([revision, self.name, self.subset, self.split, self.column]).encode()
        ).hexdigest()

    def documents(self) -> Iterator[Iterable[str]]:
        library = _library()
        try:
            dataset = library.load_dataset(self.name, self.subset, split=self.split, streaming=True)
            column = self._column(dataset)
            for row in dataset:
                text = row[column]
                if not isinstance(text, str):
                    raise FileFormatError(
                        f"text source: {self.spec}: a row of column {column!r} holds {type(text).__name__}, "
                        "text was required."
                    )
                yield pieces([text])
        except ZonalError:
            raise
        except (OSError, ValueError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> FileFormatError:
        reason = " ".join(str(error).split())
        return FileFormatError(
            f"text source: the data set {self.spec} cannot be loaded ({reason}). "
            "Check its name, subset, split and the connection."
        )

    def _column(self, rows: Any) -> str:
        stated = rows.features
        features = stated or next(iter(rows), {})
        if self.column is not None:
            if self.column not in features:
                raise ArgumentError(
                    f"text source: {self.spec}: no column {self.column!r}; it has: {', '.join(features)}."
                )
            return self.column
        strings = [
            name
            for name, each in features.items()
            if (getattr(each, "dtype", None) in ("string", "large_string") if stated else isinstance(each, str))
        ]
        if "text" in features:
            return "text"
        if len(strings) == 1:
            return strings[0]
        raise ArgumentError(
            f"text source: {self.spec}: which column? Name one as hub:{self.name}:{self.split}:<column>; it has: "
            f"{', '.join(features)}."
        )
