"""A living model: patched and unpatched, old weights read by heads, optimizers that follow, saved whole or not at all.

May import model.
"""
