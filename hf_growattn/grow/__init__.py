"""A growth from the config to the kept weights: plan, trial, search, optimizer state, and trimming.

May import `measure`, `report` and `model`, and the package's `patch`.
"""
