"""The output of tasks: from a pipe into files on the host, to the driver's terminal, and to readers of logs.

May import: the pure core, `actors.calls`, `actors.protocol` and `actors.host`.
Start with `pump.py`, which empties the pipe, and `task_output.py`. `log_reader.py` reads the files.
"""
