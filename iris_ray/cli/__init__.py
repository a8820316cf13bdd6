"""The command line ``iris-ray``, also ``python -m iris_ray``: a command is in the module of its name.

May import: everything. Ray and rich are imported inside the functions that need them, so that ``--help`` and shell
completion answer at once. Start with `main.py`; options are in `options.py`, exit codes in `exits.py`. The rooms below
know nothing of the commands: `checks/`, `simulation/` and `printing/`.
"""
