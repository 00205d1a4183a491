"""A living model: patched and unpatched, its old weights read by heads, its growths kept, its training that follows.

May import model.
"""
