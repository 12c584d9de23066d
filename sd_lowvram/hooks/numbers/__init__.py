"""Number types of weights and products, memory layouts, and the kernels that compute layers."""
