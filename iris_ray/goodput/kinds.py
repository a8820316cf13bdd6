"""What the time of a job went into."""

from enum import Enum


class TimeKind(Enum):
    """Kinds of time. The first ten are those of Google's ``ml-goodput-measurement``, and counted as there.

    PRODUCTIVE: steps whose result was kept.
    TPU_INITIALIZATION, TRAINING_PREP, DATA_LOADING_SYNC, UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME: before the first step of
        an attempt, as the task has marked it. What it has not marked is TRAINING_PREP.
    PROGRAM_STARTUP: by how much the first step of an attempt took longer than the others: compilation.
    UNPRODUCTIVE_CHECKPOINT_SAVE_TIME: saves between steps, as the task has marked them.
    WASTED_PROGRESS_FROM_DISRUPTION: steps that were done again after a disruption.
    INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION: from the last step before a disruption until user code runs again.
    OTHER: the step that was not over when the job ended without success, or that runs now.

    These are not in Google's definition:

    QUEUEING: until the job had its first slices.
    LAUNCH: until user code ran for the first time.
    UNMEASURED: user code ran, and did not say with ``heartbeat(step)`` what it did.
    """

    PRODUCTIVE = "productive"
    TPU_INITIALIZATION = "tpu_initialization"
    TRAINING_PREP = "training_prep"
    PROGRAM_STARTUP = "program_startup"
    DATA_LOADING_SYNC = "data_loading_sync"
    UNPRODUCTIVE_CHECKPOINT_SAVE_TIME = "unproductive_checkpoint_save_time"
    UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME = "unproductive_checkpoint_restore_time"
    WASTED_PROGRESS_FROM_DISRUPTION = "wasted_progress_from_disruption"
    INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION = "infrastructure_recovery_from_disruption"
    OTHER = "other"
    QUEUEING = "queueing"
    LAUNCH = "launch"
    UNMEASURED = "unmeasured"


MARKS = {
    "tpu_init": TimeKind.TPU_INITIALIZATION,
    "training_prep": TimeKind.TRAINING_PREP,
    "data_loading": TimeKind.DATA_LOADING_SYNC,
    "checkpoint_restore": TimeKind.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME,
    "checkpoint_save": TimeKind.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME,
}
"""What a task calls the parts of its time that it marks."""
