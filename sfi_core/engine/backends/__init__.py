"""How a layer attends: in PyTorch, or with Triton kernels."""
