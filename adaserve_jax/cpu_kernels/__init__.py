"""Kernels for CPUs in C++, compiled on the machine that runs them: products with few columns, paged tree attention."""
