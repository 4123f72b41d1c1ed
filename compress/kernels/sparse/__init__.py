"""Kernels for 2:4 sparse weights on NVIDIA GPUs: CUDA C++ around `mma.sp`, compiled by NVRTC without a GPU."""
