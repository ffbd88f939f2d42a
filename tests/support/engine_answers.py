"""What vLLM and SGLang answer, shortened."""

from __future__ import annotations

VLLM_METRICS = b"""# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 12058.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76439012345e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.4125
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 1341177.0
vllm:prefix_cache_queries_created{engine="0",model_name="Qwen/Qwen3-8B"} 1.7643901e+09
vllm:prefix_cache_hits_total{engine="0",model_name="Qwen/Qwen3-8B"} 1.020544e+06
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 50000.0
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 12000.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="Qwen/Qwen3-8B"} 0.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",""" + (
    b"""gpu_memory_utilization="0.9",num_cpu_blocks="None",num_gpu_blocks="5600",num_gpu_blocks_override="None","""
    + (b"""prefix_caching_hash_algo="sha256",sliding_window="None",swap_space="4"} 1.0\n""")
)

OLD_VLLM_METRICS = b"""
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False",num_gpu_blocks="573"} 1.0
vllm:num_requests_running{model_name="m"} 2.0
vllm:gpu_prefix_cache_queries{engine="0",model_name="m"} 800.0
vllm:gpu_prefix_cache_hits{engine="0",model_name="m"} 200.0
"""

SGLANG_METRICS = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:cache_hit_rate{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.0
sglang:prompt_tokens_total{model_name="m",is_streaming="false"} 3000.0
sglang:prompt_tokens_total{model_name="m",is_streaming="true"} 1096.0
sglang:generation_tokens_total{model_name="m"} 512.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 3000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 168.0
"""

SGLANG_INFO = b"""{"model_path": "/models/m", "served_model_name": "m", "page_size": 1, "dp_size": 1, "tp_size": 1,
"context_length": null, "disable_radix_cache": false, "max_total_num_tokens": 442368, "max_req_input_len": 40954,
"internal_states": [{"last_gen_throughput": 101.5, "memory_usage": {"token_capacity": 442368}}], "version": "0.5.4"}"""

VLLM_MODELS = b"""{"object": "list", "data": [
{"id": "Qwen/Qwen3-8B", "object": "model", "created": 1764390200, "owned_by": "vllm", "root": "/models/qwen3",
 "parent": null, "max_model_len": 40960, "permission": [{"id": "modelperm-1", "object": "model_permission"}]},
{"id": "sql-adapter", "object": "model", "created": 1764390200, "owned_by": "vllm", "root": "/adapters/sql",
 "parent": "Qwen/Qwen3-8B", "max_model_len": null, "permission": []}]}"""

LLAMA_CPP_MODELS = b"""{"models": [{"name": "m.gguf"}], "object": "list", "data": [
{"id": "m.gguf", "object": "model", "created": 1764390200, "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}]}"""
