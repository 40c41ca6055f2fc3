"""Fast bodies under the paths: C++ for the CPU, Triton for CUDA. Whoever has neither runs the torch paths, which are always there."""
