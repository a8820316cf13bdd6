"""Processes of this machine: their identity, their process trees, and how all processes of a tree are ended.

May import: nothing. No Ray: this works when Ray does not.
Start with `tree.py`, which ends processes that are provably ours, and nothing else. `subtree.py` is for a parent that
ends all its descendants, `bare.py` starts such a parent within milliseconds. All of it uses the standard library alone.
"""
