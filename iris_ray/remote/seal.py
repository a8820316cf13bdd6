"""Encrypts what passes through a tunnel. Ray's logs and packages hold it meanwhile, and others may read those."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from iris_ray.errors import SessionError
from iris_ray.framing import Frame, Frames

_SEALED = b"#"
"""The kind of the frames in the head's files. Each carries another frame, sealed."""


class Seal:
    """Seals what one end of a tunnel sends, and opens what the other end sends.

    Both ends agree on keys by X25519: what they tell each other gives the keys to nobody else. Each part is sealed with
    its place, so that none can be left out, repeated or moved.

    Args:
        is_head: whether this is the head's end.

    Attributes:
        public: what the other end needs of this one, as text.
    """

    def __init__(self, is_head: bool) -> None:
        self._own = X25519PrivateKey.generate()
        self._is_head = is_head
        self.public = self._own.public_key().public_bytes_raw().hex()

    def meet(self, other: str) -> None:
        """Take `public` of the other end. Nothing can be sealed or opened before that."""
        shared = self._own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
        keys = HKDF(SHA256(), 64, None, b"tunnel of iris_ray").derive(shared)
        first, second = ChaCha20Poly1305(keys[:32]), ChaCha20Poly1305(keys[32:])
        self._mine, self._others = (first, second) if self._is_head else (second, first)

    def sealed(self, data: bytes, *place: int) -> bytes:
        """Return sealed bytes.

        Args:
            data: the bytes.
            place: the number of a package, or of a file and of a frame in it; never used before by this end.
        """
        return self._mine.encrypt(_nonce(place), data, None)

    def opened(self, data: bytes, *place: int) -> bytes:
        """Return the bytes that the other end has sealed for this place.

        Raises:
            SessionError: the other end has not.
        """
        try:
            return self._others.decrypt(_nonce(place), data, None)
        except InvalidTag:
            raise SessionError(
                "somebody else has written into the tunnel, or a part is missing; open another one"
            ) from None


def _nonce(place: tuple[int, ...]) -> bytes:
    return b"".join(number.to_bytes(6, "big") for number in (0, *place)[-2:])


class SealedFile:
    """The frames of one file from the head.

    Args:
        seal: of this end.
        number: of the file.
    """

    def __init__(self, seal: Seal, number: int) -> None:
        self.number = number
        self._seal = seal
        self._count = 0
        self._frames = Frames()

    def sealed(self, frame: Frame) -> bytes:
        """Return what to write for the next frame."""
        self._count += 1
        return Frame(_SEALED, 0, self._seal.sealed(frame.packed(), self.number, self._count)).packed()

    def opened(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete with these bytes.

        Raises:
            ConnectionLost, SessionError: the other end has not sent them.
        """
        found: list[Frame] = []
        for frame in self._frames.feed(data):
            self._count += 1
            found += Frames().feed(self._seal.opened(frame.data, self.number, self._count))
        return found
