"""Layers: attention with any operator, Mamba-2, Mamba-3, MesaNet, Gated KalmaNet and Gated DeltaNet, norms, rotary
positions, feed-forward layers, mixtures, residual blocks, and the merging of tokens.
"""

from zonal.nn import rewa
from zonal.nn.attention import Attention
from zonal.nn.block import Block, Residual
from zonal.nn.convolution import ShortConvolution
from zonal.nn.experts import MixtureOfExperts
from zonal.nn.gated_deltanet import GatedDeltaNet
from zonal.nn.gated_kalmanet import GatedKalmaNet
from zonal.nn.initialise import Draws
from zonal.nn.koopman import CGLift, KoopmanMLP
from zonal.nn.mamba2 import Mamba2
from zonal.nn.mamba3 import Mamba3
from zonal.nn.memory import LayerMemory
from zonal.nn.merging import Merged, MergeSchedule
from zonal.nn.mesanet import MesaNet
from zonal.nn.mixer import TokenMixer
from zonal.nn.mixture import Mixture
from zonal.nn.mlp import SwiGLU
from zonal.nn.norm import GatedNorm, RMSNorm
from zonal.nn.rotary import RopeScaling, Rotary
from zonal.nn.stage import DenseSkip, GatedResidual, Latest, PostNorm, Records, Stage
from zonal.nn.step import DecodeStep, Prefill
from zonal.nn.topology import deaths

__all__ = [
    "Attention", "Block", "CGLift", "DecodeStep", "DenseSkip", "Draws", "GatedDeltaNet", "GatedKalmaNet", "GatedNorm",
    "GatedResidual", "KoopmanMLP", "Latest", "LayerMemory", "Mamba2", "Mamba3", "MergeSchedule", "Merged", "MesaNet",
    "Mixture", "MixtureOfExperts", "PostNorm", "Prefill", "RMSNorm", "Records", "Residual", "RopeScaling", "Rotary",
    "ShortConvolution", "Stage", "SwiGLU", "TokenMixer", "deaths", "rewa",
]  # fmt: skip
