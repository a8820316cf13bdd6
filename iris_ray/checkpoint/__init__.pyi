from .memory import MemoryCheckpointer
from .mirroring import mirror

__all__ = ["MemoryCheckpointer", "mirror"]
