"""PyTorch and Triton kernels: HyTopK, selection replay, baselines and their profiling."""
