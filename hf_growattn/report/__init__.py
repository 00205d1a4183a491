"""What a growth did, as a table, a page and pictures.

May import `model`.
"""
