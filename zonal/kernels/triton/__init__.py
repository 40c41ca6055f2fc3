"""Tile kernels for CUDA. Importing the package does not need triton. Its modules do: import them to launch a kernel."""
