"""`prefixcache plan`: how much KV a model keeps of a token, and what fits into a memory."""

from __future__ import annotations

import json
from pathlib import Path

import click

from prefixcache.cli.demo_folder import DEMO, demo_folder
from prefixcache.cpu import auto_dtype
from prefixcache.errors import ConfigError
from prefixcache.memory import DEFAULT_KV_MEMORY, available_bytes, parse_memory, parse_size
from prefixcache.model_files import has_weights, max_positions, read_json
from prefixcache.planning.budget import Budget
from prefixcache.planning.kv_layout import kv_layout
from prefixcache.planning.plan import Plan
from prefixcache.planning.report import PlanReport
from prefixcache.planning.weights import weights_bytes
from prefixcache.types import KV_BLOCK_SIZE

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_USUAL_CONTEXT = 8_192


@click.command(
    "plan",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    help="Tell what fits of a model's KV; see docs/plan.md.",
)
@click.option(
    "--model", required=True, metavar="DIR|FILE|demo", help="Folder in Hugging Face layout, a config.json, or `demo`."
)
@click.option(
    "--kv-memory",
    metavar="SIZE|PERCENT",
    help=f"KV memory of one worker; a share as `up` takes it.  [default: {DEFAULT_KV_MEMORY}, or what --memory leaves]",
)
@click.option("--num-blocks", type=click.IntRange(min=1), metavar="N", help="KV blocks, in place of --kv-memory.")
@click.option("--memory", metavar="SIZE", help="All that one worker may take, weights and KV cache and the rest.")
@click.option("--dtype", type=click.Choice(["auto", *_ELEMENT_BYTES]), default="auto", help="Type of the tensors.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help=f"Prompt and answer of one request.  [default: {_USUAL_CONTEXT}, or the model's longest]",
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(min=0),
    default=1_024,
    metavar="TOKENS",
    help="Beginning that requests have in common.",
)
@click.option("--workers", type=click.IntRange(min=1), default=1, help="Workers alike.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    model: str,
    kv_memory: str | None,
    num_blocks: int | None,
    memory: str | None,
    dtype: str,
    context: int | None,
    shared_prefix: int,
    workers: int,
    as_json: bool,
) -> None:
    path = _config_path(model)
    config = read_json(path)
    dtype = auto_dtype() if dtype == "auto" else dtype
    element_bytes = _ELEMENT_BYTES[dtype]
    layout = kv_layout(config, path)
    longest = max_positions(config, path)
    if context is not None and context > longest:
        raise ConfigError(f"--context {context:,} is over the {longest:,} positions that the model has")
    if kv_memory is not None and num_blocks is not None:
        raise ConfigError("--kv-memory and --num-blocks both say how large the KV cache is; give one of them")
    budget = Budget(
        weights_bytes=weights_bytes(path.parent, config, element_bytes) if has_weights(path.parent) else None,
        memory_bytes=None if memory is None else parse_size(memory, setting="--memory"),
        num_workers=workers,
        bytes_per_block=layout.bytes_per_token(element_bytes) * KV_BLOCK_SIZE,
    )
    if kv_memory is None and memory is None:
        kv_memory = DEFAULT_KV_MEMORY
    amount = None if kv_memory is None else parse_memory(kv_memory, setting="--kv-memory")
    report = PlanReport(
        model=path.parent.resolve().name,
        dtype=dtype,
        plan=Plan(
            layout=layout,
            element_bytes=element_bytes,
            max_positions=longest,
            num_blocks=budget.checked(num_blocks or budget.num_blocks(amount, available_bytes)),
            weights_bytes=budget.weights_bytes,
            memory_bytes=budget.memory_bytes,
        ),
        num_workers=workers,
        context_tokens=min(_USUAL_CONTEXT, longest) if context is None else context,
        shared_tokens=shared_prefix,
    )
    click.echo(json.dumps(report.figures()) if as_json else report.text())


def _config_path(model: str) -> Path:
    if model == DEMO:
        return demo_folder() / "config.json"
    path = Path(model).expanduser()
    if path.is_dir():
        return path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--model is {model}, neither a folder nor a file; name a model folder, a config.json, or `{DEMO}`"
        )
    return path
