"""The command line ``iris-ray``, also ``python -m iris_ray``.

Ray is imported by the functions that need it and not by the modules: ``--help`` and shell completion answer at once.
"""
