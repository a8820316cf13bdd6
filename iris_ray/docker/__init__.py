"""Tasks that are containers.

A service. May import: everything.
"""
