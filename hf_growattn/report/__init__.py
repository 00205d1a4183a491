"""What a growth or a race found, as words and tables.

May import `model`.
"""
