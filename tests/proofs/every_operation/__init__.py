"""Every operation of a scenario that can fail, fails once; and once the process is killed right after it.

    python -m tests.proofs.every_operation              # every scenario; prints a table
    python -m tests.proofs.every_operation secrets --share 0.1

Start with `runs.py`. `operations.py` has the operations and faults, `scenarios/` one module for each scenario.
"""
