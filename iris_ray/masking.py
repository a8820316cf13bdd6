"""Hides secrets in text that people read or send: by their values, where these are known, and by how they are named.

The text may come from a program that prints a megabyte without a line end. So no pattern takes more than linear time in
the length of a line, and text is searched line by line: a search of Python's holds all other threads.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

MOST_LINE: Final = 10_000
"""Lines are cut to this number of characters."""
LEAST_OF_SECRET: Final = 8
"""Shorter lines of a secret, such as a brace, are no secret by themselves."""
HIDDEN: Final = "***"

_WORDS = (
    r"(?:token(?!i[sz])|secret|passw(?:or)?d|passphrase|_pass(?![a-z])|_pwd|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|x-\w+-signature)"
)
_NAME = rf"(?<![\w.-])(?=[\w.-]*?{_WORDS})([\w.-]++)"
_VALUE = r"""("(?:\\.|[^"\\])*+"|'(?:\\.|[^'\\])*+'|\\+"[^"\\]*+\\+"|(?:bearer|basic)\s++[^\s,;&]++|[^\s,;&]++)"""
_NAMED = re.compile(rf"""{_NAME}([\\]*+["']?\s*+[=:]\s*+){_VALUE}""", re.IGNORECASE)
_ARGUMENT = re.compile(rf"(?=-){_NAME}(\s++){_VALUE}", re.IGNORECASE)
_HEADER = re.compile(r"""((?:authorization|cookie)["'\\]*+\s*+[=:]\s*+["']?)[^"'\r\n]++""", re.IGNORECASE)
_IN_URL = re.compile(r"""(?<=://)[^/\s@"']++@""")
_KNOWN = re.compile(  # tokens of Hugging Face, GitHub, Google, OpenAI, Slack and AWS, and JSON web tokens
    r"(?<![\w-])(?:hf_\w{20}|gh[opsur]_\w{20}|github_pat_\w{20}|ya29\.[\w-]{20}|AIza[\w-]{30}|sk-[\w-]{20}"
    r"|xox[abeprs]-[\w-]{10}|(?:AKIA|ASIA)[A-Z\d]{16}|eyJ[\w-]{10,}+\.eyJ)[\w.-]*+"
)
_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----).*?(?:(?=-----END )|\Z)", re.DOTALL)
_NUMBER = re.compile(r"[-+\d.,e]+%?")


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without secrets, each line cut to `MOST_LINE` characters.

    Left out are what is named like a secret (but not numbers of tokens), passwords in URLs, headers that authorize,
    private keys, and tokens whose form is known.

    Args:
        text: some lines.
        secrets: further values that are left out.
    """
    for secret in secrets:
        text = without_secret(text, secret)
    return "".join(_masked(line) for line in _KEY.sub(rf"\1{HIDDEN}", text).splitlines(keepends=True))


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of the variables that are named like a secret, the longest first."""
    found = {
        value
        for name, value in environ.items()
        if len(value) >= LEAST_OF_SECRET and re.search(_WORDS, name, re.IGNORECASE)
    }
    return tuple(sorted(found, key=len, reverse=True))


def without_secret(text: str, secret: str) -> str:
    """Return output without a secret, and without each line of it: the last lines may have the end of a key only."""
    lines = {line.strip() for line in secret.splitlines()}
    for part in (secret.strip(), *sorted((one for one in lines if len(one) >= LEAST_OF_SECRET), key=len, reverse=True)):
        text = text.replace(part, HIDDEN) if part else text
    return text


def _masked(line: str) -> str:
    if len(line) > MOST_LINE:
        line = f"{line[:MOST_LINE]}… ({len(line):,} characters)\n"
    line = _IN_URL.sub(f"{HIDDEN}@", _HEADER.sub(rf"\1{HIDDEN}", line))
    for pattern in (_NAMED, _ARGUMENT):
        line = pattern.sub(_hide, line)
    return _KNOWN.sub(HIDDEN, line)


def _hide(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    counts = "tokens" in name.lower() and _NUMBER.fullmatch(value)
    return found[0] if counts else f"{name}{between}{HIDDEN}"
