"""How all commands print: tables for people, JSON for programs, and durations, counts and states in words.

May import: `actors.wire`.
Start with `tables.py` and `words.py`.
"""
