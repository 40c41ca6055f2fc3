"""Memories: what operators keep of the past, as values that can be absorbed into, read, merged, subtracted, forked and
saved.
"""

from zonal.memory.base import Memory
from zonal.memory.compact import CompactStatistics
from zonal.memory.criterion import Criterion
from zonal.memory.decoding import Decoder
from zonal.memory.form import Form
from zonal.memory.keys import KeyValues
from zonal.memory.reading import Reading
from zonal.memory.ridge import FadingStatistics, RidgeStatistics
from zonal.memory.spans import Span
from zonal.memory.sums import DecayedSums, FeatureSums
from zonal.memory.tokens import Tokens
from zonal.memory.windowed import WindowedSums

__all__ = [
    "CompactStatistics", "Criterion", "DecayedSums", "Decoder", "FadingStatistics", "FeatureSums", "Form", "KeyValues",
    "Memory", "Reading", "RidgeStatistics", "Span", "Tokens", "WindowedSums",
]  # fmt: skip
