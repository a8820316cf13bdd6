"""What people see of teams, quotas and limits, and how they set them.

A service. May import: everything.
"""
