"""The fast engine: Broyden's method in product form, fused kernels, CUDA graphs and streams."""
