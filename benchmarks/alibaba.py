"""The jobs with GPUs of Alibaba's cluster-trace-gpu-v2023: openb_pod_list_default.csv of its repository, unchanged."""

from pathlib import Path

from iris_ray.study.traces import Column, TracedJob, read_trace

DAY = 86_400.0
DAYS = 149
"""The length of the trace. Most of its jobs were submitted in the last forty days."""
COLUMNS = {
    "job_id": Column(("name",)),
    "user": Column(("qos",)),
    "submitted": Column(("creation_time",)),
    "started": Column(("scheduled_time",)),
    "ended": Column(("deletion_time",)),
    "accelerators": Column(("num_gpu",)),
}


def jobs_of_last_days(path: Path, days: float) -> list[tuple[float, TracedJob]]:
    """Return the jobs with GPUs, each with the seconds from the beginning of these days to its submission."""
    with path.open(newline="") as lines:
        rows = read_trace(lines, "csv", path.name, COLUMNS)
        jobs = [row for row in rows if isinstance(row, TracedJob) and row.accelerators]
    jobs.sort(key=lambda job: job.submitted_at)
    begin = jobs[0].submitted_at + (DAYS - days) * DAY
    return [(job.submitted_at - begin, job) for job in jobs if job.submitted_at >= begin]
