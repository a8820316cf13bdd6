"""The exceptions of iris_ray.

A call with an unknown option raises Python's own TypeError, and a wait that takes too long raises TimeoutError. An
exception that a user's function raises comes as ``ray.exceptions.RayTaskError``.

::

    IrisError
    ├── InvalidRequestError (ValueError)     a request that can't work as written; nothing was acquired
    │   ├── UnknownTPUTypeError
    │   ├── InvalidSliceCountError
    │   ├── InvalidTopologyError             slices of the type have no such parts, or they can't be used so
    │   ├── InvalidConstraintError           a constraint or an attribute's value that can't work as written
    │   ├── InvalidJobError                  a job whose parts don't go together
    │   ├── InvalidMessageError              a value that is not of the type that it should be
    │   ├── UnknownNameError                 no such job, host, slice, setting, …; the message names similar ones
    │   │   └── SecretNotFoundError          the cluster's store has no secret of that name
    │   ├── InvalidTeamsError                a tree of teams that can't work as written, or a user of several teams
    │   ├── InvalidStudyError                a fleet, a workload or a trace that can't be studied as written
    │   ├── InvalidSlotError                 a model, a runner or a request that can't be served as written
    │   ├── SlotNameTakenError               somebody else serves models under that name; the message says who
    │   ├── InvalidModeError                 no such mode of a run or fault, or one that doesn't go with the request
    │   ├── InvalidClusterFileError          no RayCluster, or one that KubeRay refuses; the message names the line
    │   ├── InvalidFunctionError             a function with arguments, an async or unpicklable one, a class, …
    │   ├── InvalidQueryError                a statement for the history that writes, makes no sense, or takes too long
    │   ├── CheckpointMismatchError          a saved step holds a different state from the one to restore
    │   ├── CheckpointTooLargeError          the memory of a host has no room for the state of its processes
    │   └── UnsupportedOptionError           an option of a Ray remote function, or of Fray, that can't be honoured
    ├── LimitReachedError (RuntimeError)     the job's user has too many waiting jobs, or too many tasks
    ├── FrayMissingError (ImportError)       Fray, Marin's interface to jobs, is not installed
    ├── NoClusterError (ConnectionError)     no cluster was found, none answers, or the process has left it
    ├── ControllerUnavailableError (RuntimeError)
    ├── ServiceUnavailableError (RuntimeError)  a service of iris_ray is failing, or was taken out
    ├── HistoryUnavailableError (RuntimeError)  there is no history, or it can't be read
    ├── SecretStoreError (RuntimeError)      the cluster's store of secrets can't be read or written
    ├── NotPermittedError (PermissionError)  another user's job, team or secret, or only operators may do it
    ├── TokenRefusedError (PermissionError)  the cluster wants a token, or another token
    ├── RayJobError (RuntimeError)           Ray's job API refused the request, or gave an unreadable answer or none
    ├── ResultNotPicklableError (TypeError)  the function returned something that can't travel
    ├── ResultTooLargeError (ValueError)     the function returned more than 1 GiB; 32 MiB through a dashboard's port
    ├── ActorUnavailableError (RuntimeError) an actor of `iris_ray.fray` does not run now, or was lost during a call
    ├── PeerFilesError (OSError)              a host of the gang did not read, write, list or delete a file
    ├── InspectionFailedError (RuntimeError) stacks, a profile, a trace or chip metrics of a task are not available
    ├── SessionError (RuntimeError)          a command, terminal or port on a task's host was refused, or is lost
    │   ├── TaskNotRunningError              the task waits, or has ended; the message says what for, or how
    │   ├── TaskMovedError                   the attempt of the task ended meanwhile, and the session with it
    │   ├── CommandNotFoundError             the task's host has no such program, or can't start it
    │   └── TooManySessionsError             the task's host takes no more sessions, or no more of this user
    ├── EndpointNotFoundError (LookupError)  no running task of the job has registered that name
    ├── TaskSetupError (RuntimeError)        the runtime environment, or a module of preload, is not available on hosts
    ├── ContainerEngineError (RuntimeError)  neither docker nor podman answers on a host
    ├── TaskCrashedError (RuntimeError)      a task process ended without returning or raising, or the gang hung
    │   └── TaskOutOfMemoryError             its process was killed because its host's memory was used up
    ├── RemoteUserError (RuntimeError)       stands for a user's exception that can't be rebuilt here
    ├── PreemptedTooManyTimesError (RuntimeError)
    ├── ResultsLostError (RuntimeError)      the job succeeded, but the process that had its results died
    ├── JobCancelledError (RuntimeError)
    ├── JobUnschedulableError (RuntimeError) its tasks never ran: a timeout, a predecessor that failed, …
    │   └── LaunchesFailedError              launches failed many times in a row before any task ran
    ├── SlotQueueFullError (RuntimeError)    too many requests for models, or calls of a session, wait already
    ├── RequestExpiredError (TimeoutError)   a request for a model did not begin, or begin again, before its deadline
    ├── RequestLostError (RuntimeError)      the process of a request is gone, and the request must not be repeated
    ├── SessionEndedError (RuntimeError)     a session with a model is over; the call that raises it has not run
    ├── ModelUnavailableError (RuntimeError) a model could not be loaded, again and again, or its server can't answer
    ├── UnknownRecordError (RuntimeError)    the cluster's job records are of another version
    ├── CorruptRecordError (RuntimeError)    a job record that no version can read
    ├── VersionMismatchError (RuntimeError)  versions that do not go together; the message says which, where, what to do
    ├── ProviderError (RuntimeError)         the cloud provider's API refused, or could not be reached
    │   └── ProviderDeniedError              this account may not do that
    ├── ProvisionerTakenError (RuntimeError) another provisioner of that name runs; the message says where
    ├── NotYetError (RuntimeError)           between processes: ask again in a moment
    ├── DeposedError (RuntimeError)          an order of a Controller that another one has replaced
    ├── SupersededError (RuntimeError)       a call of a pool's process that a newer one has replaced
    └── IllegalTransitionError (RuntimeError)  a defect of ours: the state machine was asked for the impossible

All of them carry one message and nothing else, so they pickle and cross processes intact.
"""


class IrisError(Exception):
    """The base class of iris_ray's own exceptions."""


class InvalidRequestError(IrisError, ValueError):
    """The request can't work as written. Nothing was acquired."""


class UnknownTPUTypeError(InvalidRequestError):
    """No such TPU type; the message names the nearest ones that exist."""


class InvalidSliceCountError(InvalidRequestError):
    """``num_slices`` is neither a positive int nor a sequence of distinct positive ints, or is too large."""


class InvalidTopologyError(InvalidRequestError):
    """Slices of the type have no parts of this shape, or these can't be used together; the message says what can."""


class InvalidConstraintError(InvalidRequestError):
    """A constraint, or a value of an attribute, that can't work as written."""


class InvalidJobError(InvalidRequestError):
    """A job whose parts don't go together; the message says how to mend it."""


class InvalidMessageError(InvalidRequestError):
    """A value is not of the type that it should be, can't be stored, or is too large."""


class UnknownNameError(InvalidRequestError):
    """There is no such job, task, host, slice or setting; the message names similar or existing ones."""


class SecretNotFoundError(UnknownNameError):
    """The cluster's store has no secret of that name; the message names similar ones and says who can set it."""


class InvalidTeamsError(InvalidRequestError):
    """A tree of teams that can't work as written, or a job whose team is not clear; the message names the team."""


class InvalidStudyError(InvalidRequestError):
    """A fleet, a workload or a trace that can't be studied as written; the message names the place."""


class InvalidSlotError(InvalidRequestError):
    """A model, a runner or a request for a slot that can't work as written; the message says what to give."""


class SlotNameTakenError(InvalidRequestError):
    """Another driver serves models under this name, or has not released it yet; the message says what to do."""


class InvalidModeError(InvalidRequestError):
    """There is no such mode or fault, or the mode can't run the request; the message says what to give."""


class InvalidClusterFileError(InvalidRequestError):
    """The file is not a RayCluster, or KubeRay or the TPU webhook refuses it; the message names the line, if known."""


class InvalidFunctionError(InvalidRequestError):
    """The function can't be run: it needs arguments, is async or a generator, can't be pickled, or is no function."""


class InvalidQueryError(InvalidRequestError):
    """The history refuses a statement: it writes, is invalid, takes too long, or returns too much. Nothing changed."""


class CheckpointMismatchError(InvalidRequestError):
    """The newest step in memory holds a different state from the one to restore; the message names the difference."""


class CheckpointTooLargeError(InvalidRequestError):
    """Steps of this state don't fit into the memory of a host; the message has the numbers. Earlier steps stay."""


class UnsupportedOptionError(InvalidRequestError):
    """An option of a Ray remote function, or of a request by Fray, can't be honoured, and is not silently dropped."""


class LimitReachedError(IrisError, RuntimeError):
    """The job would exceed its user's limit on queued jobs or on tasks; the message has the numbers."""


class FrayMissingError(IrisError, ImportError):
    """`iris_ray.fray` needs Fray, which can't be imported in this process."""


class NoClusterError(IrisError, ConnectionError):
    """This process is not connected to a Ray cluster, or has left it.

    None was found, none answers at the given address, this machine is not one of its nodes, or the process was forked
    from a connected one or started by a task.
    """


class ControllerUnavailableError(IrisError, RuntimeError):
    """The cluster's Controller could not be started or reached."""


class ServiceUnavailableError(IrisError, RuntimeError):
    """A service of iris_ray does not answer: it is failing, as the message says, or it was taken out of iris_ray."""


class HistoryUnavailableError(IrisError, RuntimeError):
    """The history is switched off, has not begun, or can't be read or written; the message says which."""


class SecretStoreError(IrisError, RuntimeError):
    """The cluster's store of secrets can't be read or written; the message says why. Nothing has changed there."""


class NotPermittedError(IrisError, PermissionError):
    """This user may not do this; the message says who may. Nothing was done.

    Some actions are for a job's user and for operators, some for operators only; a team and a secret have their users.
    `HttpFront` raises it, for example, for a key that may not use a model.
    """


class TokenRefusedError(IrisError, PermissionError):
    """The cluster refuses requests without a token, or with this token. Nothing was done."""


class RayJobError(IrisError, RuntimeError):
    """Ray's job API refused the request, gave an answer that can't be read, or ended a call without an answer.

    The message has the reason.
    """


class ResultNotPicklableError(IrisError, TypeError):
    """The user's function returned a value that can't be pickled, or that the caller can't unpickle."""


class ResultTooLargeError(IrisError, ValueError):
    """The user's function returned a value of more than 1 GiB. Write such values to files.

    Through the port of a dashboard, each answer has at most 32 MiB: all results of a job, or the output of a command.
    """


class ActorUnavailableError(IrisError, RuntimeError):
    """An actor of `iris_ray.fray` does not run now, or was lost during a call. Newer Frays have an error for it."""


class PeerFilesError(IrisError, OSError):
    """Files of the job on a host of the gang could not be listed, read, written, copied or deleted; see the message."""


class InspectionFailedError(IrisError, RuntimeError):
    """Stacks, a profile, a trace or chip metrics of a task are not available; the message says why."""


class SessionError(IrisError, RuntimeError):
    """A command, terminal, port or `iris-ray dev` run on a task's host failed or is lost; the message says why."""


class TaskNotRunningError(SessionError):
    """A session needs a running task, and this one waits or has ended; the message says for what, or how."""


class TaskMovedError(SessionError):
    """The attempt of the task has ended, and the session with it. The job may continue on other hosts."""


class CommandNotFoundError(SessionError):
    """The host of the task has no such program, or can't start it."""


class TooManySessionsError(SessionError):
    """The host of the task takes no more sessions, or no more of this user."""


class EndpointNotFoundError(IrisError, LookupError):
    """No running task of the job has registered an endpoint of that name."""


class TaskSetupError(IrisError, RuntimeError):
    """The runtime environment can't be set up on the hosts, or they have no such module for ``preload``."""


class ContainerEngineError(IrisError, RuntimeError):
    """No container engine answers on a host; the message says why, for docker and for podman."""


class TaskCrashedError(IrisError, RuntimeError):
    """A task process ended by a signal or an exit code, without returning or raising, more often than allowed.

    A job also ends with this error when its gang hangs too often (``stall_timeout``), or makes no progress
    (``stop_without_progress``) unless the last attempt ended with an exception, which is then raised instead.
    """


class TaskOutOfMemoryError(TaskCrashedError):
    """A host's memory was used up: iris_ray, the kernel or Ray killed a task process, or Ray iris_ray's own there."""


class RemoteUserError(IrisError, RuntimeError):
    """Stands for a user's exception that could not be pickled or rebuilt, or exceeds 1 MiB; has it, or why, as text."""


class PreemptedTooManyTimesError(IrisError, RuntimeError):
    """The gang lost attempts without its own fault more often than ``max_retries_preemption`` allows.

    Lost hosts and hangs found without a ``stall_timeout`` count; with ``max_retries_preemption=0``, so do evictions.
    """


class ResultsLostError(IrisError, RuntimeError):
    """The job succeeded, but the process that had its results died before it could hand them over."""


class JobCancelledError(IrisError, RuntimeError):
    """The job was cancelled: by its user or an operator, at its ``max_runtime``, or with its process, task or group.

    A cancelled request for a model raises it as well. It is not a ``concurrent.futures.CancelledError``: if an actor
    raises one, Ray (2.60) treats the call as cancelled.
    """


class JobUnschedulableError(IrisError, RuntimeError):
    """The job ended before any of its tasks ran.

    Its ``scheduling_timeout`` has passed, a condition of ``after`` can no longer be met, a constraint can't be
    evaluated on any host, or launches have failed (`LaunchesFailedError`).
    """


class LaunchesFailedError(JobUnschedulableError):
    """The job ended before any of its tasks ran, after many failed launches; the message has the last reason.

    That is after 19 failed launches in a row, or at its ``scheduling_timeout`` after at least 10.
    """


class SlotQueueFullError(IrisError, RuntimeError):
    """Too many requests for models, or calls of a session, wait; this one was not taken. Try again in a moment."""


class RequestExpiredError(IrisError, TimeoutError):
    """A request for a model did not begin before its deadline.

    It has not run, unless it may be repeated and had run in part on a slot that was lost.
    """


class RequestLostError(IrisError, RuntimeError):
    """The process that ran a request is gone, and the request may not be repeated, or not again."""


class SessionEndedError(IrisError, RuntimeError):
    """The session with a model is over or not open; the message says why. The call has not run; open the session."""


class ModelUnavailableError(IrisError, RuntimeError):
    """A model could not be loaded several times in a row, or the server can't answer now; see the message."""


class UnknownRecordError(IrisError, RuntimeError):
    """The cluster's job records were written by another version of iris_ray."""


class CorruptRecordError(IrisError, RuntimeError):
    """A job record of this version is damaged. The job is lost; other jobs are not."""


class VersionMismatchError(IrisError, RuntimeError):
    """Two processes have versions of iris_ray, Ray or Python that do not go together; the message says where."""


class ProviderError(IrisError, RuntimeError):
    """The cloud provider's API refused the request, or could not be reached."""


class ProviderDeniedError(ProviderError):
    """The cloud provider's API says that this account may not do that."""


class ProvisionerTakenError(IrisError, RuntimeError):
    """Another provisioner of that name runs, and two would ask for the same slices; the message says where it runs."""


class NotYetError(IrisError, RuntimeError):
    """The answer is not there yet; ask again in a moment."""


class DeposedError(IrisError, RuntimeError):
    """A Controller that another one has replaced gave an order; nothing was done."""


class SupersededError(IrisError, RuntimeError):
    """A process of a pool that a newer one has replaced called the Controller; nothing was done."""


class IllegalTransitionError(IrisError, RuntimeError):
    """An event asked for a state change that the transition table does not hold: a defect in iris_ray."""
