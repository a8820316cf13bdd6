"""The command line ``iris-ray``, also ``python -m iris_ray``.

May import: everything. Ray is imported by the functions that need it and not by the modules: ``--help`` and shell
completion answer at once. Start with `main.py`.
"""
