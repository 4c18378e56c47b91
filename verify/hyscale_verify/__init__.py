"""Property-based verification of selection kernels: strategies, properties, planted bugs, targets."""
