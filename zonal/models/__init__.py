"""Models: the causal language model and its config, encoders of text and images, and initial weights that do not depend
on the operator.
"""

from zonal.models.build import build, language_model
from zonal.models.causal_lm import CausalLM, Continued
from zonal.models.config import ModelConfig
from zonal.models.convert import mamba2_from_transformers
from zonal.models.cross_entropy import cross_entropy_sum
from zonal.models.encoder import Encoder, VisionConfig, VisionEncoder
from zonal.models.export import ModelPrefill, ModelStep, Programs, export
from zonal.models.layers import layer_list
from zonal.models.memory import ModelMemory
from zonal.models.parts import LanguageModel, Predictions
from zonal.models.presets import preset
from zonal.models.sampling import Sampler
from zonal.models.text_encoder import TextEncoder

__all__ = [
    "CausalLM", "Continued", "Encoder", "LanguageModel", "ModelConfig", "ModelMemory", "ModelPrefill", "ModelStep",
    "Predictions", "Programs", "Sampler", "TextEncoder", "VisionConfig", "VisionEncoder", "build", "cross_entropy_sum",
    "export", "language_model", "layer_list", "mamba2_from_transformers", "preset",
]  # fmt: skip
