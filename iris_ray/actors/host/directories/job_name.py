"""How the directories of a job are called on a host: any id gives one safe and short file name of its own."""

import hashlib
from urllib.parse import quote

NAME_CHARS = 200
"""So much of a job's id is in the name; file systems allow 255 bytes."""


def directory_name(job_id: str) -> str:
    """Return the name of a job's directories. Ids may have "/", colons, or hundreds of bytes."""
    raw = job_id.encode(errors="surrogatepass")
    name = quote(raw, safe="")
    if len(name) > NAME_CHARS:  # two long ids may differ at their end only
        name = name[:NAME_CHARS] + "-" + hashlib.sha256(raw).hexdigest()[:16]
    return name if name.strip(".") else name.replace(".", "%2E")
