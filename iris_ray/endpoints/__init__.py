"""Names under which the tasks of a job find each other's addresses. Start with `task.py`.

A service. May import: everything.
"""
