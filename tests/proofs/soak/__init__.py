"""Does anything grow? Thousands of jobs on one simulated cluster, and what they leave, per 1,000 jobs.

    python -m tests.proofs.soak --minutes 60
    python -m tests.proofs.soak --minutes 30 --gap 0    # no faults

Callers run small jobs, one after the other: on warm slices, as gangs of two slices, on CPUs. One caller comes and goes
all the time, with cold slices, failing jobs and commands beside tasks. Meanwhile `tests.proofs.chaos` runs its own jobs
on other slices, with its faults: hosts are lost, notices come, our processes are killed, the Controller among them.

Every few seconds the meter reads the memory, descriptors and threads of Ray's and our own processes; the keys, actors
and placement groups in the GCS; and the files of the hosts and of Ray's session. At last, plain Ray tasks and actors
run for a while on the same cluster, so that Ray's own growth stands beside ours.

`meter.py` reads and computes slopes, `caller.py` is one caller, and `run.py` is the run.
"""
