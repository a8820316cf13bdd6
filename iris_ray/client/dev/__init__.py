"""Slices that a person holds and works on: what changed of a directory travels there, and a program starts at once.

`code_directory.py` lists what travels, `held_job.py` holds the slices, `warm_process.py` waits on each host and forks
for each run, and `held_run.py` is one run on all hosts. A run imports no Ray as long as the hosts are those of the run
before: the way to them is in a file.
"""
