"""Layers: attention with any operator, norms, rotary positions, the short convolution, feed-forward layers and the block."""

from zonal.nn.attention import Attention
from zonal.nn.block import Block
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.koopman import CGLift, KoopmanMLP
from zonal.nn.memory import LayerMemory
from zonal.nn.mlp import SwiGLU
from zonal.nn.norm import RMSNorm
from zonal.nn.rotary import Rotary

__all__ = ["Attention", "Block", "CGLift", "Draws", "KoopmanMLP", "LayerMemory", "RMSNorm", "Rotary", "ShortConvolution", "SwiGLU"]
