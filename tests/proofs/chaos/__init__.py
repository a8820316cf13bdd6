"""Jobs that count their steps, and everything that can happen to them, in an order that a seed decides.

    python -m tests.proofs.chaos --minutes 10 --seed 1
    python -m tests.proofs.chaos --minutes 5 --gap 0 --load 4    # no faults, but a busy machine

For so long, three jobs at a time run on four simulated slices, while a fault happens every so often: hosts are killed,
or frozen and thawed, slices preempted with and without notice, task processes killed in three ways, each of our own
actors killed, raylets killed, and each kind of process stopped for a while. Of the slices that replace others, some
have a clock that is an hour off. If root runs it, hosts are also cut off from the network, wholly or in part, or have a
slow one, disks become full, and some slices have a read-only root file system. In the end every job has its results,
once; every step was done in order, from a checkpoint or from where the attempt before was; nobody was charged for more
than happened to him; nothing is left: no process of a task or forked by one, no reservation, no claimed chip.

`run.py` has the run, `jobs.py` the jobs and what their tasks write, `checks.py` what must hold of that, and `faults.py`
what happens to them.
"""
