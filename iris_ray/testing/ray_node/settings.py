"""The settings of Ray's processes in a simulated cluster, as environment variables."""

from pathlib import Path

# A user's own environment may override these.
_RAY_SETTINGS = {
    # Ray finds a killed host in 1.5 s and a frozen one in 15 s, instead of 15 s and a minute. All hosts share one
    # machine, so a host must not count as frozen because that machine is busy.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    # A raylet that looks for its own object store a moment too early looks again after 20 ms, not after 1 s.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # No worker starts before it is needed: each costs CPU time.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # There is no agent that metrics could go to.
    "RAY_enable_metrics_collection": "0",
    # Every raylet would watch the same machine's memory, and kill workers for what the others use.
    "RAY_memory_monitor_refresh_ms": "0",
}


def ray_settings() -> dict[str, str]:
    """Return the environment for all of the cluster's Ray processes; a user's own environment wins over it."""
    return dict(_RAY_SETTINGS)


def gcs_storage(directory: Path) -> dict[str, str]:
    """Return the environment for a GCS that stores everything in a directory, so that its successor can read it."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)}
