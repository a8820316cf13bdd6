"""Commands, shells and ports beside a running task.

A service. May import: everything.
"""
