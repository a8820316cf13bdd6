"""What the time of jobs went into, and the metrics.

A service. May import: everything.
"""
