"""Kernels for CPU."""
