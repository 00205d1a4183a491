"""A model whose attention widths can differ: what builds, runs and saves one, travels with checkpoints, nothing else.

May import torch, transformers and its own files; `trust_remote_code=True` runs these where the library is not.
"""
