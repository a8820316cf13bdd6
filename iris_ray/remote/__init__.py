"""Clusters of which only the dashboard's port is reachable.

A service. May import: everything.
"""
