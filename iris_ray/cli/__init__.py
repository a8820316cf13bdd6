"""The command line ``iris-ray``, also ``python -m iris_ray``: `main.py` says where each command is.

May import: everything. Ray and rich are imported inside the functions that need them, so that ``--help`` and shell
completion answer at once. Start with `main.py`; options are in `options.py`, exit codes in `conventions.py`.
"""
