"""Kernels for the host processor: C++ compiled by the system compiler, called through ctypes."""
