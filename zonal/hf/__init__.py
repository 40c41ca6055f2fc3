"""This library in transformers: its models as classes of transformers, and its memories as caches.

Importing this package registers the models with the Auto classes, so that ``AutoModelForCausalLM.from_pretrained``
reads what they saved. The package transformers is required.
"""

try:
    import transformers as _  # noqa: F401 (said in a sentence if it is missing)
except ImportError as error:
    raise ImportError(f"zonal.hf: the package transformers is required ({error}). pip install 'zonal[hf]'") from error

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zonal.hf.attending import register
from zonal.hf.cache import CACHE, MemoryCache, ZonalCache
from zonal.hf.configuration import ZonalConfig, ZonalVisionConfig
from zonal.hf.context import ContextMemory, Document
from zonal.hf.layers import operators
from zonal.hf.modeling import (
    ZonalForCausalLM,
    ZonalForImageClassification,
    ZonalForMaskedLM,
    ZonalForSequenceClassification,
    ZonalModel,
)
from zonal.hf.refusal import Question, Refusal, RefuseUnknown, calibrate_refusal
from zonal.hf.swap import convert, from_pretrained

AutoConfig.register(ZonalConfig.model_type, ZonalConfig)
AutoConfig.register(ZonalVisionConfig.model_type, ZonalVisionConfig)
AutoModel.register(ZonalConfig, ZonalModel)
AutoModelForCausalLM.register(ZonalConfig, ZonalForCausalLM)
# Trainer reads this mapping to decide whether it shifts the labels of a model before it smooths them
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ZonalConfig.model_type] = ZonalForCausalLM.__name__
AutoModelForMaskedLM.register(ZonalConfig, ZonalForMaskedLM)
AutoModelForSequenceClassification.register(ZonalConfig, ZonalForSequenceClassification)
AutoModelForImageClassification.register(ZonalVisionConfig, ZonalForImageClassification)

__all__ = [
    "CACHE",
    "ContextMemory",
    "Document",
    "MemoryCache",
    "Question",
    "Refusal",
    "RefuseUnknown",
    "ZonalCache",
    "ZonalConfig",
    "ZonalForCausalLM",
    "ZonalForImageClassification",
    "ZonalForMaskedLM",
    "ZonalForSequenceClassification",
    "ZonalModel",
    "ZonalVisionConfig",
    "calibrate_refusal",
    "convert",
    "from_pretrained",
    "operators",
    "register",
]
