"""`prefixcache simulate`: replays traces over simulated fleets and prints what each policy makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from prefixcache.config import FiniteRange
from prefixcache.cpu import usable_cores
from prefixcache.errors import ConfigError
from prefixcache.limits import LOAD_REPORT_S
from prefixcache.routing.eta import Eta
from prefixcache.routing.round_robin import RoundRobin
from prefixcache.simulation.cells import Cell, Row, run_cells
from prefixcache.simulation.costs import StepCosts
from prefixcache.simulation.plot import require_plot, write_plot
from prefixcache.simulation.policies import NAMES, POOLED
from prefixcache.simulation.scenario import Kill
from prefixcache.simulation.setup import Setup, hot
from prefixcache.simulation.sizes import USUAL_LOAD
from prefixcache.simulation.table import table
from prefixcache.simulation.target import Target, fewest_workers
from prefixcache.simulation.trace import Trace
from prefixcache.simulation.trace_files import read_trace

_MOST_WORKERS = 1_024
_STEPS = StepCosts()
_USUAL_WORKERS = "8"
_USUAL_SEARCH = "1-64"


def _numbers(text: str, kind: Callable[[str], Any], what: str, least: float, most: float) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(least <= value <= most for value in values):
        raise ConfigError(f"{what} is {text!r}; it must be numbers from {least:g} to {most:g}, with commas between")
    return values


def _workers(text: str, flag: str = "--workers") -> list[int]:
    """`4,8,16` or `1-32`."""
    span = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    if span is None:
        return _numbers(text, int, flag, 1, _MOST_WORKERS)
    first, last = int(span[1]), int(span[2])
    if not 1 <= first <= last <= _MOST_WORKERS:
        raise ConfigError(f"{flag} is {text!r}; a range goes up, from 1 to {_MOST_WORKERS} at most")
    return list(range(first, last + 1))


def _kill(text: str) -> Kill:
    match = re.fullmatch(r"([1-9][0-9]*)@([0-9]*\.?[0-9]+)", text)
    if match is None:
        raise ConfigError(f"--kill is {text!r}; it must be like 3@600: worker 3 dies after 600 s")
    return Kill(worker=int(match[1]), at_s=float(match[2]))


def _minutes(traces: Sequence[Trace], text: str) -> list[Trace]:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)-([0-9]*\.?[0-9]+)", text)
    if match is None or float(match[1]) >= float(match[2]):
        raise ConfigError(f"--minutes is {text!r}; it must be like 0-10")
    parts = [trace.between(60 * float(match[1]), 60 * float(match[2])) for trace in traces]
    for part in parts:
        if not part.requests:
            raise ConfigError(f"--minutes {text}: {part.name} has no request in that time")
    return parts


@click.command(
    "simulate",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    help="Replay TRACE files over simulated workers, through the policies that the proxy runs; see docs/simulate.md.",
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--policy", default=f"{Eta.name},{RoundRobin.name},{POOLED}", help=f"Of {', '.join(NAMES)}; or `all`.")
@click.option(
    "--workers",
    help=f"Numbers of workers to try, as 4,8,16 or 1-32.  [default: {_USUAL_WORKERS}; {_USUAL_SEARCH} to find them]",
)
@click.option("--find-workers", metavar="TARGET", help="Find the fewest workers with which it holds, as p99<=2s.")
@click.option("--capacity", default="0.10", help="Share of the trace's unique blocks that all caches together hold.")
@click.option("--cache-tokens", type=click.IntRange(1), help="Tokens of each worker's cache, in place of --capacity.")
@click.option(
    "--load", help=f"Share of the time in which one pooled cache is busy: sets the rate. [default: {USUAL_LOAD}]"
)
@click.option("--prefill-rate", type=FiniteRange(0, min_open=True), help="Tokens/s of each worker, in place of --load.")
@click.option("--overhead-ms", type=FiniteRange(0), default=20.0, help="Of each prefill, or slice of one.")
@click.option("--itl-ms", type=FiniteRange(0), default=25.0, help="Inter-token latency of answers.")
@click.option("--arrival-speed", default="1", help="Factors by which requests come, and users think, faster.")
@click.option("--minutes", metavar="FROM-TO", help="Only this part of each trace.")
@click.option(
    "--proxies", type=click.IntRange(1, 64), default=1, help="They share the requests, each with its own view."
)
@click.option("--load-lag-ms", type=FiniteRange(0), default=1000 * LOAD_REPORT_S, help="Time between two load reports.")
@click.option("--event-lag-ms", type=FiniteRange(0), default=0.0, help="Until the index shows what a cache holds.")
@click.option("--rate-error", type=FiniteRange(0, 3), default=0.0, help="Lognormal sigma of the rates' error.")
@click.option("--kill", metavar="WORKER@SECONDS", multiple=True, help="A worker dies and stays away; repeatable.")
@click.option("--hot-share", type=FiniteRange(0, 1), default=0.0, help="Conversations that get a hot prefix.")
@click.option("--hot-blocks", type=click.IntRange(1, 1024), default=8, help="Length of the hot prefix.")
@click.option(
    "--order", type=click.Choice(["mean", "tail", "fifo"]), help="In place of each policy's own; so the next ones."
)
@click.option("--slices/--no-slices", default=None, help="Long prefills make room for short ones.")
@click.option("--steal/--no-steal", default=None, help="Idle workers are given what waits elsewhere.")
@click.option("--pending/--no-pending", default=None, help="What is about to be stored counts as held.")
@click.option(
    "--steps", is_flag=True, help="Chunked prefill and decodes share engine steps, as in `worker --runner sim`:"
)
@click.option("--sim-prefill-us", type=float, default=_STEPS.prefill_us, help="for each token of a chunk,")
@click.option("--sim-step-ms", type=float, default=_STEPS.step_ms, help="for each step,")
@click.option("--sim-itl-ms", type=float, default=_STEPS.itl_ms, help="for one with decodes,")
@click.option("--sim-itl-per-sequence-ms", type=float, default=_STEPS.itl_per_sequence_ms, help="for each of them,")
@click.option(
    "--sim-itl-per-1k-context-ms", type=float, default=_STEPS.itl_per_1k_context_ms, help="for their context;"
)
@click.option("--sim-speed", type=float, default=_STEPS.speed, help="all of it divided by this.")
@click.option("--seed", type=click.IntRange(0), default=1, help="The same seed gives the same output.")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, help="Rows are means over so many, from --seed on.")
@click.option("--jobs", type=click.IntRange(1), default=usable_cores, show_default="cores", help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write percentiles against what varies, as .png or .svg.")
def simulate(traces: Sequence[Path], **options: Any) -> None:
    if options["plot"] is not None:
        require_plot(options["plot"])
    read = [read_trace(path) for path in traces]
    if options["minutes"] is not None:
        read = _minutes(read, options["minutes"])
    read = hot(read, options["hot_share"], options["hot_blocks"])
    seeds = range(options["seed"], options["seed"] + options["seeds"])
    content: dict[str, Any]
    if options["find_workers"] is not None:
        rows, found, said = _search(read, options, seeds)
        content = {"rows": [row.figures() for row in rows], "found": found}
    else:
        rows, said = run_cells(_cells(read, options), seeds, jobs=options["jobs"]), []
        content = {"rows": [row.figures() for row in rows]}
    click.echo(json.dumps(content) if options["as_json"] else "\n".join([table(rows), *said]))
    if options["plot"] is not None:
        write_plot(rows, options["plot"])


def _setup(options: dict[str, Any]) -> Setup:
    if options["load"] is not None and (options["prefill_rate"] is not None or options["steps"]):
        raise ConfigError("--load sets the prefill rate, so it goes neither with --prefill-rate nor with --steps")
    if options["prefill_rate"] is not None and options["steps"]:
        raise ConfigError("--steps has a rate of its own: set --sim-prefill-us and --sim-step-ms, not --prefill-rate")
    changes: dict[str, object] = {
        name: options[name] for name in ("slices", "steal", "pending") if options[name] is not None
    }
    if options["order"] is not None:
        changes["order"] = None if options["order"] == "fifo" else options["order"]
    steps = StepCosts(
        prefill_us=options["sim_prefill_us"],
        step_ms=options["sim_step_ms"],
        itl_ms=options["sim_itl_ms"],
        itl_per_sequence_ms=options["sim_itl_per_sequence_ms"],
        itl_per_1k_context_ms=options["sim_itl_per_1k_context_ms"],
        speed=options["sim_speed"],
    )
    return Setup(
        cache_tokens=options["cache_tokens"],
        rate=options["prefill_rate"],
        steps=steps if options["steps"] else None,
        overhead_s=options["overhead_ms"] / 1000,
        inter_token_s=options["itl_ms"] / 1000,
        num_proxies=options["proxies"],
        load_lag_s=options["load_lag_ms"] / 1000,
        event_lag_s=options["event_lag_ms"] / 1000,
        rate_error=options["rate_error"],
        kills=tuple(map(_kill, options["kill"])),
        changes=tuple(changes.items()),
    )


def _policies(options: dict[str, Any]) -> Sequence[str]:
    return NAMES if options["policy"] == "all" else options["policy"].split(",")


def _cells(traces: Sequence[Trace], options: dict[str, Any]) -> list[Cell]:
    setup = _setup(options)
    capacities = _numbers(options["capacity"], float, "--capacity", 1e-6, 1000.0)
    loads = _numbers(options["load"] or str(USUAL_LOAD), float, "--load", 0.01, 100.0)
    speeds = _numbers(options["arrival_speed"], float, "--arrival-speed", 1e-3, 1e6)
    workers = _workers(options["workers"] or _USUAL_WORKERS)
    return [
        setup.cell(trace, policy, num_workers, capacity=capacity, load=load, arrival_speed=speed)
        for trace, num_workers, capacity, load, speed, policy in product(
            traces, workers, capacities, loads, speeds, _policies(options)
        )
    ]


def _search(
    traces: Sequence[Trace], options: dict[str, Any], seeds: Sequence[int]
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:
    """All rows that were run, what was found, and the same in words."""
    target = Target.parse(options["find_workers"])
    if options["cache_tokens"] is None or (options["prefill_rate"] is None and not options["steps"]):
        raise ConfigError(
            "--find-workers needs to know what a worker can do: give --cache-tokens, and --prefill-rate or --steps"
        )
    setup = _setup(options)
    [speed, *others] = _numbers(options["arrival_speed"], float, "--arrival-speed", 1e-3, 1e6)
    if others:
        raise ConfigError("--find-workers takes one --arrival-speed")
    workers = _workers(options["workers"] or _USUAL_SEARCH)
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    said: list[str] = []
    for trace, policy in product(traces, _policies(options)):

        def run(num_workers: int, trace: Trace = trace, policy: str = policy) -> Row:
            cell = setup.cell(trace, policy, num_workers, arrival_speed=speed)
            return run_cells([cell], seeds, jobs=options["jobs"])[0]

        row, tried = fewest_workers(run, target, least=workers[0], most=workers[-1])
        rows += tried
        num_workers = None if row is None else row.cell.scenario.num_workers
        found.append({"trace": trace.name, "policy": policy, "target": str(target), "workers": num_workers})
        enough = f"{num_workers} workers"
        if row is None:
            enough = f"not with {workers[-1]} workers, which have {target.value_s(tried[-1]):.1f} s"
        said.append(f"{trace.name}, {policy}: {target}: {enough}")
    return rows, found, said
