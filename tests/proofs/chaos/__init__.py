"""Jobs that count their steps, and everything that can happen to them, in an order that a seed decides.

    python -m tests.proofs.chaos --minutes 10 --seed 1
    python -m tests.proofs.chaos --minutes 5 --gap 0 --load 4    # no faults, but a busy machine

Three jobs at a time run on four simulated slices, and every few seconds a fault happens. Hosts are killed, or frozen
and thawed. Slices are preempted with and without notice. Task processes are killed in three ways, and so are our actors
and the raylets; each kind of process is stopped for a while. Of the slices that replace others, some have a clock that
is an hour off. If root runs it, hosts also lose their network, wholly or in part, or get a slow one; some slices have a
read-only root file system, others a small disk, which is filled for a while.

One of the three is a program of JAX that keeps its state in the memory of its hosts.

In the end, every job has its results once. Each task did every step in order, from a checkpoint or from where its last
attempt was. A state that was kept in memory came back to the bit, from the newest whole step if one of its slices was
left, and never from an attempt that a later one had replaced. No job was charged for a loss that no fault explains. No
process of a task, forked ones included, no reservation and no claimed chip is left.

`run.py` has the run, `jobs.py` the jobs and what their tasks write, `checks.py` what must hold of that, and `faults.py`
what happens to them.
"""
