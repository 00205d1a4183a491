"""What a growth or a race found, as tables, a page and pictures.

May import `model`.
"""
