"""A living model: patched and unpatched, its attention widened and cut, saved whole or not at all, loaded if whole.

May import model.
"""
