"""Every metric of the project: names, help, labels and buckets. The only module that knows prometheus_client.

Names are `prefixcache_` + the stem vLLM uses; base units; `_total` for counters. A proxy and a worker never export the
same name, so that a sum over all scraped jobs counts nothing twice.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import prefixcache
from prefixcache.errors import EngineFault, EngineTimeout, EngineUnreachable, Overloaded, Unavailable, WorkerFault

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each counter, which nobody reads

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120)
ITL_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
LOOKUP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05)
PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
"""Queue, prefill and decode of one request: a cached prefill takes milliseconds, a long answer minutes."""
STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)


SERVER_ERROR_CODES = (
    *(error.code for error in (Unavailable, Overloaded, WorkerFault, EngineUnreachable, EngineFault, EngineTimeout)),
    "internal_error",
)
"""Errors that are not the client's. Counted from the start as 0, so that the first one shows as an increase."""
REUSES = ("none", "part", "most")
"""Of a prompt: nothing was cached, less than half of its tokens, half or more."""


def reuse_of(*, prompt_tokens: int, cached_tokens: int) -> str:
    """One of REUSES."""
    return REUSES[0] if cached_tokens == 0 else REUSES[1] if 2 * cached_tokens < prompt_tokens else REUSES[2]


MISSES = ("new", "elsewhere", "gone")
"""Why a prompt token was computed: no worker had it, another one did and had more ahead, or it was expected where the
prompt went, and was evicted meanwhile."""


def misses_of(*, prompt_tokens: int, cached_tokens: int, hit_tokens: int, best_hit_tokens: int) -> tuple[int, int, int]:
    """Tokens by MISSES; together they are what was not cached. `hit_tokens`: predicted where the prompt went."""
    known = max(best_hit_tokens, hit_tokens, cached_tokens)
    return (
        max(prompt_tokens - known, 0),
        min(known, prompt_tokens) - min(max(hit_tokens, cached_tokens), prompt_tokens),
        max(min(hit_tokens, prompt_tokens) - cached_tokens, 0),
    )


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format; its content type is CONTENT_TYPE."""
    return generate_latest(registry)


class ProxyMetrics:
    """What one proxy process exports."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace="prefixcache", registry=registry)
        gauge = partial(Gauge, namespace="prefixcache", registry=registry)
        histogram = partial(Histogram, namespace="prefixcache", registry=registry)
        self._add_requests(counter, histogram)
        self._add_index(counter, gauge, histogram)
        self._add_routing(counter, gauge)
        _add_process(registry, "proxy")
        info = Info("build", "What runs", namespace="prefixcache", subsystem="proxy", registry=registry)
        info.info({"version": prefixcache.__version__})

    def observe_reuse(self, model: str, ttft_s: float, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Of a completed request: what the cache was worth to it."""
        reuse = reuse_of(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        self.time_to_first_token_by_reuse.labels(model, reuse).observe(ttft_s)

    def count_misses(
        self, model: str, *, prompt_tokens: int, cached_tokens: int, hit_tokens: int, best_hit_tokens: int
    ) -> None:
        """Of a completed request."""
        tokens = misses_of(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            hit_tokens=hit_tokens,
            best_hit_tokens=best_hit_tokens,
        )
        for why, count in zip(MISSES, tokens, strict=True):
            self.missed_tokens.labels(model, why).inc(count)

    def _add_requests(self, counter: partial[Counter], histogram: partial[Histogram]) -> None:
        ttft = partial(histogram, labelnames=("model",), buckets=TTFT_BUCKETS_S)
        phase = partial(histogram, labelnames=("model",), buckets=PHASE_BUCKETS_S)
        self.requests = counter("requests", "Requests answered, by HTTP status", ("model", "code"))
        self.request_errors = counter("request_errors", "Requests that ended in an error, by its code", ("code",))
        for code in SERVER_ERROR_CODES:
            self.request_errors.labels(code)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of completed requests", ("model",))
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose KV was reused", ("model",))
        self.missed_tokens = counter(
            "missed_tokens",
            "Prompt tokens that were computed, by why: new to all, elsewhere with more ahead, or gone meanwhile",
            ("model", "why"),
        )
        self.predicted_hit_tokens = counter("predicted_hit_tokens", "Hit tokens the index predicted", ("model",))
        self.generation_tokens = counter("generation_tokens", "Output tokens of completed requests", ("model",))

        self.time_to_first_token = ttft("time_to_first_token_seconds", "Request received to first token")
        self.time_to_first_token_by_reuse = histogram(
            "time_to_first_token_by_reuse_seconds",
            "The same of completed requests, by how much of the prompt was reused: none, part (under half of it), most",
            ("model", "reuse"),
            buckets=TTFT_BUCKETS_S,
        )
        self.e2e_request_latency = ttft("e2e_request_latency_seconds", "Request received to its end")
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Gap between output tokens of one generation; behind an engine, between two pieces of its stream",
            ("model",),
            buckets=ITL_BUCKETS_S,
        )
        self.request_queue_time = phase(
            "request_queue_time_seconds", "Time of one generation before its first chunk, by its worker's account"
        )
        self.request_prefill_time = phase(
            "request_prefill_time_seconds", "First chunk to first token of one generation, by its worker's account"
        )
        self.request_decode_time = phase(
            "request_decode_time_seconds", "First token to the end of one generation, by its worker's account"
        )

    def _add_index(self, counter: partial[Counter], gauge: partial[Gauge], histogram: partial[Histogram]) -> None:
        self.index_lookup = histogram(
            "index_lookup_seconds", "Time of one match in the index", buckets=LOOKUP_BUCKETS_S
        )
        self.index_lookup_failures = counter("index_lookup_failures", "Matches that gave no answer in time")
        self.index_commit = histogram(
            "index_commit_seconds",
            "Time for which a prompt with a long prefill waited for its commit",
            buckets=LOOKUP_BUCKETS_S,
        )
        self.index_commit_failures = counter("index_commit_failures", "Such commits that gave no answer in time")
        self.index_available = gauge(
            "index_available", "1 if the index answers; 0: prompts are routed by this proxy's own placements"
        )
        self.redis_memory = gauge("redis_memory_bytes", "Memory that Redis uses, by its own account; 0: not known")
        self.redis_memory_limit = gauge(
            "redis_memory_limit_bytes", "Its maxmemory, beyond which it refuses writes; 0: none, or not known"
        )
        self.pending_claims = counter(
            "pending_claims",
            "Prompts whose pending claims were placed, settled by their first token, or released without one",
            ("change",),
        )

    def _add_routing(self, counter: partial[Counter], gauge: partial[Gauge]) -> None:
        """Where prompts go, and the workers and engines they can go to."""
        self.rescored_decisions = counter(
            "rescored_decisions", "Decisions made again because a commit told of a deeper prefix", ("outcome",)
        )
        self.own_placement_decisions = counter(
            "own_placement_decisions",
            "Prompts routed by what this proxy remembers: the index gave no answer, or a worker announces again",
            ("cause",),
        )
        self.routing_decisions = counter("routing_decisions", "Prompts routed, by reason", ("policy", "reason"))
        self.steals = counter(
            "steals",
            "Waiting requests asked back for an idle worker: moved there, stayed as they had started, left or failed",
            ("outcome",),
        )
        self.continuations = counter(
            "continuations",
            "Generations that lost their worker: moved to another one at once, waited for one, whole already, left by "
            "their client meanwhile, or failed",
            ("outcome",),
        )
        self.num_requests_held = gauge("num_requests_held", "Requests that wait for a worker to be there")
        self.held_requests = counter(
            "held_requests",
            "Such waits by their end: a worker came, none came in time, the client left, or too many waited already",
            ("outcome",),
        )
        self.num_requests_waiting = gauge(
            "num_requests_waiting", "Requests of this proxy not started on the worker", ("worker",)
        )
        self.num_requests_running = gauge(
            "num_requests_running", "Requests of this proxy started on the worker", ("worker",)
        )
        self.worker_breaker_open = gauge(
            "worker_breaker_open",
            "1 if the worker failed requests in a row, or hung: others are asked first, but for a trial now and then",
            ("worker",),
        )
        self.workers_ready = gauge("workers_ready", "Workers connected and ready", ("model",))
        self.workers_lost = counter(
            "workers_lost",
            "Streams to workers that ended without the worker having taken leave: killed, hung, or cut off",
        )
        self.engine_up = gauge("engine_up", "1 if the engine answers; 0: it gets no request", ("engine",))
        self.engine_answered = gauge(
            "engine_answered_timestamp_seconds",
            "When the engine last passed a probe of this proxy; 0: never",
            ("engine",),
        )
        self.engine_slow = gauge(
            "engine_slow", "1 if the engine gets requests only where no other one may take them", ("engine",)
        )
        self.engine_probe_failures = counter("engine_probe_failures", "Probes that an engine failed", ("engine",))


class WorkerMetrics:
    """What one worker process exports."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace="prefixcache", subsystem="worker", registry=registry)
        gauge = partial(Gauge, namespace="prefixcache", subsystem="worker", registry=registry)
        histogram = partial(Histogram, namespace="prefixcache", subsystem="worker", registry=registry)

        _add_process(registry, "worker")
        self.build = Info("build", "What runs", namespace="prefixcache", subsystem="worker", registry=registry)
        self.identify(worker="", model="")

        self.loading = gauge("loading", "1 while the model loads: it takes no request yet")
        self.serving = gauge("serving", "1 while it takes requests; 0: it loads, or it leaves")
        self.kv_cache_usage = Gauge(
            "prefixcache_kv_cache_usage", "Fraction of KV blocks held by running requests, 0 to 1", registry=registry
        )
        self.blocks = gauge("blocks", "KV blocks of the cache")
        self.cached_blocks = gauge("cached_blocks", "KV blocks whose content can be found and reused")
        self.requests_running = gauge("requests_running", "Requests in the running batch")
        self.requests_waiting = gauge("requests_waiting", "Requests not started")
        self.prefill_rate = gauge(
            "prefill_tokens_per_second", "Measured speed of long prefills; 0 while there were none"
        )
        self.prefill_rest = gauge(
            "prefill_rest_seconds", "Time until the worker chooses the next prefill, at that speed"
        )
        self.requests = counter("requests", "Requests ended or turned away, by reason", ("reason",))

        self.request_queue_time = histogram(
            "request_queue_time_seconds", "Request received to the start of its first chunk", buckets=PHASE_BUCKETS_S
        )
        self.request_prefill_time = histogram(
            "request_prefill_time_seconds", "Start of the first chunk to the first token", buckets=PHASE_BUCKETS_S
        )
        self.request_decode_time = histogram(
            "request_decode_time_seconds",
            "First token to the end of the request, whatever ended it",
            buckets=PHASE_BUCKETS_S,
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Request received by the worker to its first token", buckets=TTFT_BUCKETS_S
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Gap between output tokens of one request", buckets=ITL_BUCKETS_S
        )
        self.step_seconds = histogram("step_seconds", "Time of one engine step", buckets=STEP_BUCKETS_S)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose KV was reused, in whole blocks")
        self.copied_tokens = counter(
            "copied_tokens", "Prompt tokens whose KV was copied from a block that begins alike"
        )
        self.generation_tokens = counter("generation_tokens", "Output tokens")
        self.prefill_tokens = counter("prefill_tokens", "Tokens computed in prefill chunks")
        self.prefill_seconds = counter(
            "prefill_seconds", "Time that prefill chunks took; of a step with decodes beside them, their part of it"
        )
        self.decode_tokens = counter("decode_tokens", "Tokens drawn without a prefill chunk: one a sequence and step")
        self.decode_seconds = counter("decode_seconds", "Time that these took, likewise")
        self.preemptions = counter("preemptions", "Requests that lost their blocks and began again")
        self.evictions = counter("evicted_blocks", "KV blocks that lost their content")
        self.published_hashes = counter("published_hashes", "Claims written to the index", ("change",))
        self.predictions = counter(
            "predictions",
            "Hit tokens read in the index against those cached at the start of the request: right, too_many, too_few",
            ("outcome",),
        )
        self.repaired_claims = counter("repaired_claims", "Claims told again after a wrong prediction", ("change",))
        self.publish_failures = counter("publish_failures", "Index writes that failed and were sent again")

    def identify(self, *, worker: str, model: str) -> None:
        """Under which name proxies know the process, beside its version."""
        self.build.info({"version": prefixcache.__version__, "worker": worker, "model": model})


def _add_process(registry: CollectorRegistry, subsystem: str) -> None:
    """Memory, CPU time, open files and start time of this process, where /proc tells."""
    ProcessCollector(namespace=f"prefixcache_{subsystem}", registry=registry)
