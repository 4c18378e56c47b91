"""Sparse latent attention: cases, error bounds, what it promises, and planted bugs."""
