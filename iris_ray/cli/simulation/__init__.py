"""How ``iris-ray simulate`` shows what a simulation led to: tables and a picture.

May import: `cli.printing`, `simulation`, the pure core.
Start with `tables.py`.
"""
