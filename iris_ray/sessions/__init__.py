"""Commands, shells and ports on the host of a running task.

A service. May import: everything.
"""
