"""The command `growattn`: what its commands read, run and print.

May import every other room.
"""
