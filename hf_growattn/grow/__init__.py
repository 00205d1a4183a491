"""A growth from the config to new dims that are kept: plan, trial, search, and trimming.

May import `measure`, `report`, `growable` and `model`.
"""
