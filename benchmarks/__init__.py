"""Benchmarks: correctness first, ratios against a named peer in the same process, results as JSON."""
