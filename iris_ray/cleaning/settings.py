"""The cluster settings of the cleaning."""

from typing import Final

from iris_ray.model.cluster_settings import OFF, ClusterSetting, count_or_off

HOST_FILES_DAYS = ClusterSetting(
    "host_files_days",
    "14",
    f"days, or {OFF}",
    "After how many days without a change unused files of libtpu, Ray and iris_ray are removed on hosts and the head.",
    count_or_off,
)
HOST_FILES_GB = ClusterSetting(
    "host_files_gb",
    "20",
    f"gigabytes, or {OFF}",
    "How much these files may take on each machine; then the oldest unused ones go first.",
    count_or_off,
)

SETTINGS: Final = (HOST_FILES_DAYS, HOST_FILES_GB)
