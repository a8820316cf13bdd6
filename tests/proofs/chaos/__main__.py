"""A run of chaos as a command."""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tests.proofs.chaos
from tests.proofs.chaos.run import Chaos


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proofs.chaos", description=(tests.proofs.chaos.__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which faults")
    parser.add_argument("--gap", type=float, default=12.0, help="seconds between two faults, on average; 0: no faults")
    parser.add_argument("--load", type=int, default=0, help="processes that compete for the machine's CPUs")
    given = parser.parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[chaos {time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        chaos = Chaos(given.seed, Path(directory), say)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.load)]
        try:
            chaos.run(given.minutes * 60, given.gap)
        except BaseException:
            again = f"--seed {given.seed} --minutes {given.minutes:g} --gap {given.gap:g} --load {given.load}"
            print(f"failed with {again}", flush=True)
            raise
        finally:
            for process in busy:
                process.kill()
                process.wait()
    print(f"seed {given.seed}: {chaos.jobs_done} jobs, {chaos.faults.total()} faults: {dict(chaos.faults)}")
    print(f"{chaos.redone} steps of tasks were done again; {len(chaos.false_alarms)} false alarms")
    print(f"{len(chaos.overlaps)} tasks went on beside the next attempt, on hosts that nothing kept from hearing of it")
    print(f"later attempts with a state went on from {dict(chaos.restores)}; {len(chaos.losses)} were wrong")
    for finding in chaos.findings:
        print(f"  {finding}")
    return 1 if chaos.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
