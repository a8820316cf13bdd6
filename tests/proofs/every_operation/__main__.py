"""See the package."""

import argparse
import json
import sys
from pathlib import Path

from tests.proofs.every_operation.runs import report_of
from tests.proofs.every_operation.scenarios import SCENARIOS


def main() -> None:
    parser = argparse.ArgumentParser(description="Let every operation of a scenario fail once.")
    parser.add_argument("names", nargs="*", help="scenarios; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="the part of all faults that are tried")
    parser.add_argument("--seed", type=int, default=0, help="chooses them")
    parser.add_argument("--defect", help="put this defect in")
    parser.add_argument("--first", action="store_true", help="end with the first finding")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--all", action="store_true", help="print all findings, not the first three of each scenario")
    args = parser.parse_args()
    if unknown := set(args.names) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(sorted(SCENARIOS))}")
    found = {}
    print("| scenario | operations | faults tried | findings |\n|---|---:|---:|---:|")
    for name in args.names or SCENARIOS:
        report = report_of(SCENARIOS[name](), args.share, args.seed, args.defect, args.first)
        found[name] = [
            {"at": one.at, "operation": one.operation, "fault": one.fault.value, "why": one.why}
            for one in report.findings
        ]
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.operations.most_common())
        print(
            f"| {name} | {report.operations.total()}: {kinds} | {report.runs:,} | {len(report.findings)} |", flush=True
        )
        for one in report.findings[: None if args.all else 3]:
            print(f"\n{name}, operation {one.at} ({one.operation}), {one.fault.value}:\n{one.why}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(found))
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
