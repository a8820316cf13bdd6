"""Checks this machine, the cluster and each host; gathers a bug report.

A service. May import: everything.
"""
