"""Figures about a process: what it spends, their quantiles and spread, and their rows in a table."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass
class Spent:
    wall_s: float
    cpu_s: float


def spent(process: psutil.Process, action: Callable[[], Any]) -> Spent:
    """What an action takes of the clock, and of the process's CPU time."""
    cpu, start = cpu_s(process), time.perf_counter()
    action()
    return Spent(time.perf_counter() - start, cpu_s(process) - cpu)


def percentile(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def quantiles(samples: list[float]) -> str:
    return f"p50 {percentile(samples, 0.5):.1f}, p99 {percentile(samples, 0.99):.1f}"


def row(what: str, value: str, goal: str = "") -> None:
    print(f"| {what} | {value} | {goal} |", flush=True)


def spread(samples: list[float], form: str) -> str:
    """The median, and the least and the most."""
    low, middle, high = (format(f(samples), form) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"
