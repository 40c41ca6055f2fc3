"""The CPU kernel: one C++ template, compiled once for each link into the user's cache."""
