"""The cluster settings of output directories."""

from typing import Final

from iris_ray.model.cluster_settings import OFF, ClusterSetting, count_or_off

TASK_OUTPUT_GB = ClusterSetting(
    "task_output_gb",
    "10",
    f"gigabytes, or {OFF}",
    "Space that the output directory of one attempt of a task may take; beyond it, its oldest files are removed.",
    count_or_off,
)
TASK_OUTPUT_DAYS = ClusterSetting(
    "task_output_days",
    "7",
    f"days, or {OFF}",
    "Age at which the output directories of ended attempts are removed.",
    count_or_off,
)
HOST_OUTPUT_GB = ClusterSetting(
    "host_output_gb",
    "30",
    f"gigabytes, or {OFF}",
    "Space that the output directories of ended attempts may take on each host; beyond it, the oldest are removed.",
    count_or_off,
)

SETTINGS: Final = (TASK_OUTPUT_GB, TASK_OUTPUT_DAYS, HOST_OUTPUT_GB)
GB: Final = 1 << 30
