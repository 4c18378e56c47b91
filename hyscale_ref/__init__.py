"""What "right" means: NumPy oracles in float64, and the records both wings of HyScale share.

Nothing here imports torch or triton. Shape letters, everywhere in the project: T queries, S keys,
H indexer heads, D indexer head size, K = top_k selected keys, L layers.
"""
