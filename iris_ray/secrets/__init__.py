"""The cluster's store of secrets.

A service. May import: everything.
"""
