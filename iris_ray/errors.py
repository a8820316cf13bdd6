"""Every error that iris_ray raises on purpose.

::

    IrisError
    ├── InvalidRequestError (ValueError)     refused when it is made; nothing was acquired
    │   ├── UnknownTPUTypeError
    │   ├── InvalidSliceCountError
    │   ├── InvalidTopologyError             slices of the type have no such parts; the message lists the others
    │   ├── InvalidConstraintError           a constraint or an attribute's value that can't work as written
    │   ├── InvalidJobError                  a job whose parts don't go together
    │   ├── InvalidMessageError              a value that is not of the type that it should be
    │   ├── UnknownNameError                 no such job, host, slice, setting, …; the message names the nearest
    │   │   └── SecretNotFoundError          the cluster's store has no secret of that name
    │   ├── InvalidTeamsError                a tree of teams that can't work as written, or a user of several teams
    │   ├── InvalidStudyError                a fleet, a workload or a trace that can't be studied as written
    │   ├── InvalidSlotError                 a model, a runner or a request that can't be served as written
    │   ├── SlotNameTakenError               somebody else serves models under that name; the message says who
    │   ├── InvalidModeError                 no such mode of a run, or no such fault; the message names the nearest
    │   ├── InvalidClusterFileError          no RayCluster, or one that KubeRay refuses; the message names the line
    │   ├── InvalidFunctionError             not a zero-argument function, a bound DAG node, not picklable, …
    │   ├── InvalidQueryError                a statement for the history that writes, makes no sense, or takes too long
    │   ├── CheckpointMismatchError          a step that was saved is of another state than the one to restore
    │   ├── CheckpointTooLargeError          the memory of a host has no room for the state of its processes
    │   └── UnsupportedOptionError           an option of a Ray remote function that a gang can't honour
    ├── LimitReachedError (RuntimeError)     the job's user has too many waiting jobs, or too many tasks
    ├── FrayMissingError (ImportError)       Fray, Marin's interface to jobs, is not installed
    ├── NoClusterError (ConnectionError)     Ray is not initialised and no cluster was found, or the process has left it
    ├── ControllerUnavailableError (RuntimeError)
    ├── ServiceUnavailableError (RuntimeError)  a service of iris_ray is failing, or was taken out
    ├── HistoryUnavailableError (RuntimeError)  there is no history, or it can't be read
    ├── SecretStoreError (RuntimeError)      the cluster's store of secrets can't be read or written
    ├── NotPermittedError (PermissionError)  it is another user's job, or only operators may do it
    ├── TokenRefusedError (PermissionError)  the cluster wants a token, or another token
    ├── RayJobError (RuntimeError)           Ray's job API refused the request, or gave an unreadable answer or none
    ├── ResultNotPicklableError (TypeError)  the function returned something that can't travel
    ├── ResultTooLargeError (ValueError)     the function returned more than 1 GiB; 32 MiB through a dashboard's port
    ├── ActorUnavailableError (RuntimeError) an actor of `iris_ray.fray` does not run now, or was lost during a call
    ├── PeerFilesError (OSError)              a host of the gang did not read, write, list or delete a file
    ├── InspectionFailedError (RuntimeError) the stacks or the profile of a task are not available
    ├── SessionError (RuntimeError)          a command, terminal or port on a task's host was refused, or is lost
    │   ├── TaskNotRunningError              the task waits, or has ended; the message says what for, or how
    │   ├── TaskMovedError                   the attempt of the task ended meanwhile, and the session with it
    │   ├── CommandNotFoundError             the task's host has no such program, or can't start it
    │   └── TooManySessionsError             the task's host takes no more sessions, or no more of this user
    ├── EndpointNotFoundError (LookupError)  no running task of the job has registered that name
    ├── TaskSetupError (RuntimeError)        the runtime environment could not be set up on the hosts
    ├── ContainerEngineError (RuntimeError)  neither docker nor podman answers on a host
    ├── TaskCrashedError (RuntimeError)      a task process ended without returning or raising
    │   └── TaskOutOfMemoryError             its process was killed, because its host's memory was used up
    ├── RemoteUserError (RuntimeError)       stands for a user's exception that can't be rebuilt here
    ├── PreemptedTooManyTimesError (RuntimeError)
    ├── ResultsLostError (RuntimeError)      the job succeeded, but the process that had its results died
    ├── JobCancelledError (RuntimeError)
    ├── JobUnschedulableError (RuntimeError) its tasks never got to run: a timeout, or a constraint that can't be met
    │   └── LaunchesFailedError              its tasks could not be started, again and again
    ├── SlotQueueFullError (RuntimeError)    too many requests for models wait already
    ├── RequestExpiredError (TimeoutError)   a request for a model did not begin before its deadline
    ├── RequestLostError (RuntimeError)      the process of a request is gone, and the request must not be repeated
    ├── SessionEndedError (RuntimeError)     a session with a model is over; the call that raises it has not run
    ├── ModelUnavailableError (RuntimeError) a model could not be loaded, again and again
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
    """Base of every error that iris_ray raises on purpose."""


class InvalidRequestError(IrisError, ValueError):
    """The request can't work as written. Nothing was acquired."""


class UnknownTPUTypeError(InvalidRequestError):
    """No such TPU type; the message names the nearest ones that exist."""


class InvalidSliceCountError(InvalidRequestError):
    """``num_slices`` is not a positive int or a sequence of distinct positive ints."""


class InvalidTopologyError(InvalidRequestError):
    """Slices of the type have no parts of this shape, or these can't be used together; the message says what can."""


class InvalidConstraintError(InvalidRequestError):
    """A constraint, or a value of an attribute, that can't work as written."""


class InvalidJobError(InvalidRequestError):
    """A job whose parts don't go together; the message says how to mend it."""


class InvalidMessageError(InvalidRequestError):
    """A value is not of the type that it should be, can't be stored, or is too large."""


class UnknownNameError(InvalidRequestError):
    """No such job, task, host or slice; the message names the nearest ones that exist."""


class SecretNotFoundError(UnknownNameError):
    """The cluster's store has no secret of that name; the message names the nearest, and says who can set it."""


class InvalidTeamsError(InvalidRequestError):
    """A tree of teams that can't work as written, or a job whose team is not clear; the message names the team."""


class InvalidStudyError(InvalidRequestError):
    """A fleet, a workload or a trace that can't be studied as written; the message names the place."""


class InvalidSlotError(InvalidRequestError):
    """A model, a runner or a request for a slot that can't work as written; the message says what to give."""


class SlotNameTakenError(InvalidRequestError):
    """Another driver serves models under this name; the message says whose it is, and how to attach."""


class InvalidModeError(InvalidRequestError):
    """No such mode of a run, or a fault that can't be simulated; the message names the nearest."""


class InvalidClusterFileError(InvalidRequestError):
    """A file that is not a RayCluster, or one that KubeRay or the TPU webhook refuses; the message names the line."""


class InvalidFunctionError(InvalidRequestError):
    """The function can't be run on a gang: it needs arguments, can't be pickled, or is not a function."""


class InvalidQueryError(InvalidRequestError):
    """A statement that the history can't take: it writes, makes no sense, or takes too long. Nothing was changed."""


class CheckpointMismatchError(InvalidRequestError):
    """The newest step in memory is of another state than the one to restore; the message names the difference."""


class CheckpointTooLargeError(InvalidRequestError):
    """Steps of this state don't fit into the memory of a host; the message has the numbers. Earlier steps stay."""


class UnsupportedOptionError(InvalidRequestError):
    """An option of a Ray remote function can't be honoured for a gang, and is not silently dropped."""


class LimitReachedError(IrisError, RuntimeError):
    """The job's user has reached a limit on waiting jobs or on tasks; the message has the numbers."""


class FrayMissingError(IrisError, ImportError):
    """`iris_ray.fray` needs Fray, which can't be imported in this process."""


class NoClusterError(IrisError, ConnectionError):
    """Ray is not initialised in this process and no running cluster was found, or the process has left its cluster."""


class ControllerUnavailableError(IrisError, RuntimeError):
    """The cluster's Controller could not be started or reached."""


class ServiceUnavailableError(IrisError, RuntimeError):
    """A service of iris_ray does not answer: it is failing, as the message says, or it was taken out of iris_ray."""


class HistoryUnavailableError(IrisError, RuntimeError):
    """The history is switched off, has not begun, or can't be read or written; the message says which."""


class SecretStoreError(IrisError, RuntimeError):
    """The cluster's store of secrets can't be read or written; the message says why. Nothing has changed there."""


class NotPermittedError(IrisError, PermissionError):
    """Only a job's user, or an operator, may do this; the message says who. Nothing was done."""


class TokenRefusedError(IrisError, PermissionError):
    """The cluster refuses requests without a token, or with this token. Nothing was done."""


class RayJobError(IrisError, RuntimeError):
    """Ray's job API refused the request, gave an answer that can't be read, or ended a call without an answer.

    The message has the reason.
    """


class ResultNotPicklableError(IrisError, TypeError):
    """The user's function returned a value that can't be sent to the caller."""


class ResultTooLargeError(IrisError, ValueError):
    """The user's function returned a value of more than 1 GiB. Write such values to files.

    Through the port of a dashboard, each answer has at most 32 MiB: all results of a job, or the output of a command.
    """


class ActorUnavailableError(IrisError, RuntimeError):
    """An actor of `iris_ray.fray` does not run now, or was lost during a call. Newer Frays have an error for it."""


class PeerFilesError(IrisError, OSError):
    """A host of the gang did not list, read, write or delete files of the job; the message says which, and why."""


class InspectionFailedError(IrisError, RuntimeError):
    """The stacks or the profile of a task are not available; the message says why, and what to do."""


class SessionError(IrisError, RuntimeError):
    """A command, terminal or port on a task's host was refused, or is lost; the message says why, and what to do."""


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
    """The task processes could not be started as asked for: their runtime environment can't be set up."""


class ContainerEngineError(IrisError, RuntimeError):
    """No container engine answers on a host; the message says why, for docker and for podman."""


class TaskCrashedError(IrisError, RuntimeError):
    """A task process ended by a signal or an exit code, without returning or raising."""


class TaskOutOfMemoryError(TaskCrashedError):
    """iris_ray, the kernel or Ray killed a task process, because the memory of its host was used up."""


class RemoteUserError(IrisError, RuntimeError):
    """Stands for a user's exception that could not be pickled or rebuilt; carries its traceback as text."""


class PreemptedTooManyTimesError(IrisError, RuntimeError):
    """The gang lost its hosts more often than ``max_retries_preemption`` allows."""


class ResultsLostError(IrisError, RuntimeError):
    """The job succeeded, but the process that had its results died before it could hand them over."""


class JobCancelledError(IrisError, RuntimeError):
    """The job was cancelled, by its owner or because its owner is gone.

    No ``concurrent.futures.CancelledError``: if an actor raises one, Ray (2.60) takes the call for cancelled.
    """


class JobUnschedulableError(IrisError, RuntimeError):
    """The job was given up because it could not be started: out of time, or its constraints can't be evaluated."""


class LaunchesFailedError(JobUnschedulableError):
    """The job was given up because launches of it failed many times in a row; the message has the last reason."""


class SlotQueueFullError(IrisError, RuntimeError):
    """So many requests for models wait that no more are taken; nothing was kept of this one. Try again in a moment."""


class RequestExpiredError(IrisError, TimeoutError):
    """A request for a model did not begin before its deadline. It has not run."""


class RequestLostError(IrisError, RuntimeError):
    """The process that ran a request is gone, and the request may not be repeated, or not once more."""


class SessionEndedError(IrisError, RuntimeError):
    """A session with a model is over; the message says why. The call has not run. Open the session again."""


class ModelUnavailableError(IrisError, RuntimeError):
    """A model could not be loaded, several times in a row; the message has the last reason."""


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
    """A Controller gave an order though another one has taken over; nothing was done."""


class SupersededError(IrisError, RuntimeError):
    """A process of a pool called the Controller though a newer one has taken its place; nothing was done."""


class IllegalTransitionError(IrisError, RuntimeError):
    """An event asked for a state change that the transition table does not hold: a defect in iris_ray."""
