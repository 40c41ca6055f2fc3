"""Tile kernels for CUDA. Importing the package needs no triton; its modules do, and are imported by whoever launches a kernel."""
