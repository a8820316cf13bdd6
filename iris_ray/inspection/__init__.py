"""What a running task does now: stacks, profiles, traces of XLA, the use of its chips.

A service. May import: everything.
"""
