"""Held slices, and code that travels to them: `iris-ray dev`, notebooks.

A service. May import: everything.
"""
