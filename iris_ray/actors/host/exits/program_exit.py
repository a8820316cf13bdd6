"""The exit of a program that a task runs in place of a function."""

from iris_ray.model.outcomes import EndKind


class ProgramExit(SystemExit):
    """Ends a task with the exit code of its program.

    Args:
        code: the exit code.
        words: how the program ended, as a sentence for people.
        kind: what such an end is called.
    """

    def __init__(self, code: int, words: str, kind: EndKind = EndKind.EXITED) -> None:
        super().__init__(code)
        self.words = words
        self.kind = kind
