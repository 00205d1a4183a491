"""Growth inside a training: the callback for Trainer, fine-tuning, and the race that says what is worth training.

May import `interop` and all below it.
"""
