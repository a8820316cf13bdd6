"""No secret is left in text that people read or send, and hostile text costs no time."""

import time

import pytest

from iris_ray.masking import MOST_LINE, masked, secret_values, without_secret


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("HF_TOKEN=hf_abc,next", "HF_TOKEN=***,next"),
        ('{"api_key": "abc def", "steps": 3}', '{"api_key": ***, "steps": 3}'),
        ("{'api_key': 'abc', 'steps': 3}", "{'api_key': ***, 'steps': 3}"),
        (r"{\"token\": \"abc\", \"steps\": 3}", r"{\"token\": ***, \"steps\": 3}"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("authorization: token abc", "authorization: ***"),
        ("Set-Cookie: session=abc; path=/", "Set-Cookie: ***"),
        ("password: 'a b'", "password: ***"),
        (r"password='a\' b' c", "password=*** c"),
        ("PASSWORD=12345678", "PASSWORD=***"),
        ("DB_PASS=abc bypass: yes", "DB_PASS=*** bypass: yes"),
        ("python train.py --api-key abc --steps 3", "python train.py --api-key *** --steps 3"),
        ("gs://me:word@bucket/x", "gs://***@bucket/x"),
        ("https://ghp_abc@github.com/x", "https://***@github.com/x"),
        ("redis://:word@host", "redis://***@host"),
        ("https://x/y?X-Goog-Signature=abc&z=1", "https://x/y?X-Goog-Signature=***&z=1"),
        ("cloned with hf_abcdefghijklmnopqrstuvwxyz.", "cloned with ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nnext", None),
        ("the end of a key: -----BEGIN PRIVATE KEY-----\nabc", "the end of a key: -----BEGIN PRIVATE KEY-----***"),
        (
            "tokens: 4,096, tokens_per_s=1.5e+4 --max-tokens 4096",
            "tokens: 4,096, tokens_per_s=1.5e+4 --max-tokens 4096",
        ),
        ("tokenizer=gpt2, tokenizing: fast", "tokenizer=gpt2, tokenizing: fast"),
        ("F1130 04:00:00 tpu.cc:12] Check failed: a == b", "F1130 04:00:00 tpu.cc:12] Check failed: a == b"),
    ],
)
def test_secrets_are_masked(text: str, said: str | None) -> None:
    expected = "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nnext" if said is None else said
    assert masked(text) == expected


def test_values_that_are_known_are_masked_without_their_names() -> None:
    environ = {"HF_TOKEN": "abcdefgh", "MY_API_KEY": "abcdefgh-ijk", "HOME": "/home/ann", "SHORT_SECRET": "1"}
    assert secret_values(environ) == ("abcdefgh-ijk", "abcdefgh")
    assert masked("abcdefgh-ijk by abcdefgh in /home/ann", secret_values(environ)) == "*** by *** in /home/ann"


@pytest.mark.parametrize(
    "text", ["a", "-", "x-", "token", "token=", 'token="', "--token ", "://", "eyJ", "-----BEGIN PRIVATE KEY-----"]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    """A search holds all threads of its process. In quadratic time, 100 kB without a line end held them for hours."""
    began = time.process_time()
    assert len(masked(text * (1_000_000 // len(text)))) < 2 * MOST_LINE
    assert time.process_time() - began < 30.0


def test_long_lines_are_cut_and_say_so() -> None:
    cut, after = masked("a" * (MOST_LINE + 1) + "\nnext").splitlines()
    assert cut == "a" * MOST_LINE + f"… ({MOST_LINE + 2:,} characters)"
    assert after == "next"


def test_secret_of_many_lines_is_left_out_also_in_part() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n  AoIBAQC7VJTUt9\n}\n-----END PRIVATE KEY-----\n"
    assert without_secret("AoIBAQC7VJTUt9\n}\n-----END PRIVATE KEY-----\nbye", key) == "***\n}\n***\nbye"
    assert without_secret(f"its key: {key.strip()}!", key) == "its key: ***!"
    assert without_secret("s3 and s3cr3t-token", "s3cr3t-token") == "s3 and ***"
    assert without_secret("all of it", " \n") == "all of it"
