"""Growth inside a training: the callback for Trainer, and fine-tuning on a text.

May import `interop` and all below it.
"""
