"""What new dims could do about a loss: the mathematics, passes over batches, probes, gradients, and views.

May import `model`. Nothing here changes a weight.
"""
