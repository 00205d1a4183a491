"""Grown models in other hands: peft's method, stock checkpoints, model cards.

May import `grow` and all below it.
"""
