"""What outlives the cluster: export and import.

A service. May import: everything.
"""
