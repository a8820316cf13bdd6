"""Whole jobs with random faults, in virtual time. A story takes about 0.1 s, and all of iris_ray is real but the hosts.

Hosts die, freeze and announce their end; processes of iris_ray and of tasks are killed; chips are held by others.
Meanwhile other jobs evict these, and people cancel some or kill a driver. No job is charged a failure unless a task of
it is killed, none is lost, and nothing goes on that is over.

`story.py` is one story, `faults.py` what happens to its cluster. Start with `story.py`; ``python -m
tests.proofs.random_stories --help`` plays many.
"""
