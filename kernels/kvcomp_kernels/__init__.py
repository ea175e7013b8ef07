"""Kernels that run in place of the torch definitions in `kvcomp`."""
