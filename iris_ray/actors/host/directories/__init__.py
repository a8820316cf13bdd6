"""Where files are on a host: iris_ray's own directory, and the one that each job has there.

May import: `actors.wire`.
Start with `host_directory.py`.
"""
