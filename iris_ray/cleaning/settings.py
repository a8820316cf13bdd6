"""The cluster settings of the cleaning."""

from typing import Final

from iris_ray.model.cluster_settings import OFF, ClusterSetting, count_or_off

HOST_FILES_DAYS = ClusterSetting(
    "host_files_days",
    "14",
    f"days, or {OFF}",
    "Age at which unused files of libtpu, Ray and iris_ray, and core dumps of tasks, are removed from all machines,"
    " and copies of unreadable records from the cluster's store.",
    count_or_off,
)
HOST_FILES_GB = ClusterSetting(
    "host_files_gb",
    "20",
    f"gigabytes, or {OFF}",
    "Space that the files of libtpu and Ray may take on each machine, and the same again for core dumps; beyond it, the"
    " oldest unused ones are removed.",
    count_or_off,
)

SETTINGS: Final = (HOST_FILES_DAYS, HOST_FILES_GB)
