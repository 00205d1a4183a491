"""A growth from the config to new dims that are kept: plan, trial and search.

May import `measure`, `report`, `growable` and `model`.
"""
