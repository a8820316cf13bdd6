"""The command ``python -m tests.proofs.random_stories``."""

import argparse
import logging
import time
from collections import Counter

from tests.proofs.random_stories.story import play


def main() -> None:
    """Play stories, and say what has happened in them."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.random_stories", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first story")
    parser.add_argument("--count", type=int, default=1000, help="how many stories")
    parser.add_argument("--verbose", action="store_true", help="show what iris_ray says")
    asked = parser.parse_args()
    logging.disable(logging.NOTSET if asked.verbose else logging.CRITICAL)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    began, counts = time.monotonic(), Counter[str]()
    for seed in range(asked.first, asked.first + asked.count):
        counts += play(seed)
    print(f"{asked.count} stories in {time.monotonic() - began:.0f} s without a finding")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
