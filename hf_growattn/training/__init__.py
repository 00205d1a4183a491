"""Growth inside a training: the callback for Trainer, the ways to train by few weights, and the race between them.

May import `interop` and all below it.
"""
