"""Files that begin as the kernel's core dumps do."""


def core_dump(size: int = 5000, kind: int = 4, order: str = "little") -> bytes:
    """Return an ELF file of 64 bits; its kind 4 is a core dump, and 2 a program.

    Args:
        order: "little" or "big".
    """
    number = kind.to_bytes(2, "big" if order == "big" else "little")
    return (b"\x7fELF\2" + (b"\2" if order == "big" else b"\1") + bytes(10) + number).ljust(size, b"x")[:size]
