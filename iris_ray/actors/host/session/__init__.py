"""Commands, terminals and ports beside a task, for people who look inside.

May import: the pure core, `actors.calls`, `actors.protocol` and `actors.host`.
Start with `host_session.py`. `channels.py` has the bytes of one command or connection, `keeper.py` is the process that
ends a command's whole tree, and `surroundings.py` tells which variables the task has.
"""
