"""How the API refuses a request."""

import grpc


class Refusal(Exception):
    """The status that answers a call instead of a result."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
