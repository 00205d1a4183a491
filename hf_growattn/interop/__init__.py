"""Grown models in other hands: peft's method, stock checkpoints, the Hub and its cards.

May import `grow` and all below it.
"""
