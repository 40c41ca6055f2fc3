"""Models: the causal language model, an encoder, their config, and initial weights that do not depend on the operator."""

from zonal.models.causal_lm import CausalLM, Continued, Predictions, build
from zonal.models.config import ModelConfig
from zonal.models.convert import mamba2_from_transformers
from zonal.models.cross_entropy import cross_entropy_sum
from zonal.models.encoder import Encoder
from zonal.models.layers import layer_list
from zonal.models.memory import ModelMemory
from zonal.models.presets import preset
from zonal.models.sampling import Sampler

__all__ = ["CausalLM", "Continued", "Encoder", "ModelConfig", "ModelMemory", "Predictions", "Sampler", "build", "cross_entropy_sum", "layer_list", "mamba2_from_transformers", "preset"]
