"""Every metric of the project: names, help, labels and buckets. The only module that knows prometheus_client.

Names are `prefixcache_` + the stem vLLM uses; base units; `_total` for counters. A proxy and a worker never export the
same name, so that a sum over all scraped jobs counts nothing twice.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each counter, which nobody reads

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120)
ITL_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
LOOKUP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05)
PHASE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
"""Queue, prefill and decode of one request: a cached prefill takes milliseconds, a long answer minutes."""
STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format; its content type is CONTENT_TYPE."""
    return generate_latest(registry)


class ProxyMetrics:
    """What one proxy process exports."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "prefixcache_requests", "Requests answered, by HTTP status", ("model", "code"), registry=registry
        )
        self.request_errors = Counter(
            "prefixcache_request_errors", "Requests that ended in an error, by its code", ("code",), registry=registry
        )
        self.prompt_tokens = Counter(
            "prefixcache_prompt_tokens", "Prompt tokens of completed requests", ("model",), registry=registry
        )
        self.cached_tokens = Counter(
            "prefixcache_cached_tokens", "Prompt tokens whose KV was reused", ("model",), registry=registry
        )
        self.predicted_hit_tokens = Counter(
            "prefixcache_predicted_hit_tokens", "Hit tokens the index predicted", ("model",), registry=registry
        )
        self.generation_tokens = Counter(
            "prefixcache_generation_tokens", "Output tokens of completed requests", ("model",), registry=registry
        )
        self.time_to_first_token = Histogram(
            "prefixcache_time_to_first_token_seconds",
            "Request received to first token",
            ("model",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "prefixcache_inter_token_latency_seconds",
            "Gap between output tokens of one generation",
            ("model",),
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.e2e_request_latency = Histogram(
            "prefixcache_e2e_request_latency_seconds",
            "Request received to its end",
            ("model",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.request_queue_time = Histogram(
            "prefixcache_request_queue_time_seconds",
            "Time of one generation before its first chunk, by its worker's account",
            ("model",),
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.request_prefill_time = Histogram(
            "prefixcache_request_prefill_time_seconds",
            "First chunk to first token of one generation, by its worker's account",
            ("model",),
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.request_decode_time = Histogram(
            "prefixcache_request_decode_time_seconds",
            "First token to the end of one generation, by its worker's account",
            ("model",),
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.index_lookup = Histogram(
            "prefixcache_index_lookup_seconds",
            "Time of one match in the index",
            buckets=LOOKUP_BUCKETS_S,
            registry=registry,
        )
        self.index_lookup_failures = Counter(
            "prefixcache_index_lookup_failures", "Matches that gave no answer in time", registry=registry
        )
        self.routing_decisions = Counter(
            "prefixcache_routing_decisions", "Requests routed, by reason", ("policy", "reason"), registry=registry
        )
        self.num_requests_waiting = Gauge(
            "prefixcache_num_requests_waiting",
            "Requests of this proxy not started on the worker",
            ("worker",),
            registry=registry,
        )
        self.num_requests_running = Gauge(
            "prefixcache_num_requests_running",
            "Requests of this proxy started on the worker",
            ("worker",),
            registry=registry,
        )
        self.workers_ready = Gauge(
            "prefixcache_workers_ready", "Workers connected and ready", ("model",), registry=registry
        )


class WorkerMetrics:
    """What one worker process exports."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.kv_cache_usage = Gauge(
            "prefixcache_kv_cache_usage", "Fraction of KV blocks held by running requests, 0 to 1", registry=registry
        )
        self.cached_blocks = Gauge(
            "prefixcache_worker_cached_blocks", "KV blocks whose content can be found and reused", registry=registry
        )
        self.requests_running = Gauge(
            "prefixcache_worker_requests_running", "Requests in the running batch", registry=registry
        )
        self.requests_waiting = Gauge("prefixcache_worker_requests_waiting", "Requests not started", registry=registry)
        self.requests = Counter(
            "prefixcache_worker_requests", "Requests ended or turned away, by reason", ("reason",), registry=registry
        )
        self.request_queue_time = Histogram(
            "prefixcache_worker_request_queue_time_seconds",
            "Request received to the start of its first chunk",
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.request_prefill_time = Histogram(
            "prefixcache_worker_request_prefill_time_seconds",
            "Start of the first chunk to the first token",
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.request_decode_time = Histogram(
            "prefixcache_worker_request_decode_time_seconds",
            "First token to the end of the request, whatever ended it",
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "prefixcache_worker_time_to_first_token_seconds",
            "Request received by the worker to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "prefixcache_worker_inter_token_latency_seconds",
            "Gap between output tokens of one request",
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "prefixcache_worker_prompt_tokens", "Prompt tokens of started requests", registry=registry
        )
        self.cached_tokens = Counter(
            "prefixcache_worker_cached_tokens", "Prompt tokens whose KV was reused", registry=registry
        )
        self.generation_tokens = Counter("prefixcache_worker_generation_tokens", "Output tokens", registry=registry)
        self.preemptions = Counter(
            "prefixcache_worker_preemptions", "Requests that lost their blocks and began again", registry=registry
        )
        self.evictions = Counter(
            "prefixcache_worker_evicted_blocks", "KV blocks that lost their content", registry=registry
        )
        self.step_seconds = Histogram(
            "prefixcache_worker_step_seconds", "Time of one engine step", buckets=STEP_BUCKETS_S, registry=registry
        )
        self.published_hashes = Counter(
            "prefixcache_worker_published_hashes", "Claims written to the index", ("change",), registry=registry
        )
        self.publish_failures = Counter(
            "prefixcache_worker_publish_failures", "Index writes that failed and were sent again", registry=registry
        )
