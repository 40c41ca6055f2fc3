"""Compiled kernels under the paths: C++ for the CPU, Triton for CUDA. Without them the torch paths run instead."""
