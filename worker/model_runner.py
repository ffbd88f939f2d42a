"""Executes steps with a transformers model: one packed forward a step, then one draw a finished share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixcache.errors import ConfigError, WorkerFault
from prefixcache.memory import MemoryAmount
from prefixcache.types import KV_BLOCK_SIZE
from worker import identity
from worker.attention import self_test
from worker.attention.backend import AttentionBackend, Examination, attending
from worker.attention.backends import BackendChoice, choose_backend
from worker.attention.cost import pair_rows
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.step_layout import StepLayout
from worker.kv_cache import KVCache, KVShape, fit_blocks
from worker.kv_memory import kv_memory_bytes, warn_of_excess
from worker.model_folder import ModelFolder
from worker.model_loader import check_length, load_model, resolve_device, resolve_dtype, vocab_size
from worker.rope import freeze_rope
from worker.runner import Drawn, Runner, RunnerLimits, StepShare
from worker.sampler import sample

logger = logging.getLogger(__name__)


class TorchRunner(Runner):
    """Runner over a model and its KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        max_model_len: int,
        threads: int,
        backend: AttentionBackend | None = None,
    ) -> None:
        """Without a backend, the one for CPUs."""
        self._model = model
        self._threads = threads
        self._backend = CpuSdpa(cache) if backend is None else backend
        self.cache = cache
        self.limits = RunnerLimits(
            block_size=cache.shape.block_size,
            num_blocks=cache.num_blocks,
            max_model_len=max_model_len,
            vocab_size=vocab_size(model),
            kv_bytes_per_token=cache.shape.bytes_per_token,
            pair_rows=pair_rows(model, cache.shape),
        )

    @torch.inference_mode()
    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        results: list[Drawn | Exception | None] = [self._fault(share) for share in shares]
        sound = [place for place, fault in enumerate(results) if fault is None]
        if not sound:
            return results
        logits = self.logits([shares[place] for place in sound])
        sampled = [(place, spec) for place in sound if (spec := shares[place].sample) is not None]
        drawn = sample(logits.cpu(), [spec for _, spec in sampled])
        for (place, _), result in zip(sampled, drawn, strict=True):
            results[place] = result
        return results

    @torch.inference_mode()
    def logits(self, shares: Sequence[StepShare]) -> Tensor:
        """[num_samples, vocab_size] after the last token of every share with a sample; KV of all shares is written."""
        torch.set_num_threads(self._threads)  # OpenMP keeps it per calling thread: a new thread starts with all cores
        self._copy_beginnings(shares)
        step = StepLayout.pack(shares, self.limits.block_size, self.cache.device)
        with attending(self._backend, step):
            output = self._model(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=step.sampled_rows,
            )
        logits: Tensor = output.logits[0, : step.num_samples]
        return logits

    def _copy_beginnings(self, shares: Sequence[StepShare]) -> None:
        for share in shares:
            if share.copied_block is not None:
                place, num_tokens = divmod(share.start, self.limits.block_size)
                self.cache.copy(share.copied_block, share.block_table[place], num_tokens)

    def _fault(self, share: StepShare) -> Exception | None:
        """Ids outside the vocabulary would end the whole forward."""
        if share.token_ids and max(share.token_ids) < self.limits.vocab_size:
            return None
        return WorkerFault(f"token ids are none, or not below the vocabulary size of {self.limits.vocab_size}")


def load_runner(
    folder: ModelFolder,
    *,
    dtype: str,
    num_blocks: int | None,
    kv_memory: MemoryAmount,
    max_model_len: int | None,
    threads: int,
    device: str = "auto",
    attention: str = "auto",
    deterministic: bool = False,
    block_size: int = KV_BLOCK_SIZE,
) -> TorchRunner:
    """Loads the model, tries it, and makes room for its KV; takes seconds. Raises ConfigError naming what is wrong.

    `num_blocks` None: as many as fit into `kv_memory`, of which a share is taken once the weights are loaded.
    `max_model_len` None: what model and KV cache allow. `deterministic`: only if neither what was cached nor the cut of
    prompts nor their neighbours change a bit of an answer.
    """
    torch.set_num_threads(threads)
    if max_model_len is not None and max_model_len > folder.max_position_embeddings:
        raise ConfigError(
            f"maximum model length {max_model_len:,} is over the {folder.max_position_embeddings:,} positions "
            f"that model {folder.name} has"
        )
    place = resolve_device(device)
    model = load_model(folder, resolve_dtype(dtype, place), place)
    examination = self_test.examine(model)
    shape = KVShape(layers=examination.shapes, dtype=model.dtype, block_size=block_size)
    memory_bytes = 0 if num_blocks is not None else kv_memory_bytes(kv_memory, place)
    blocks = fit_blocks(shape, num_blocks=num_blocks, kv_memory_bytes=memory_bytes, required_tokens=max_model_len)
    warn_of_excess(blocks * shape.bytes_per_block, place)
    longest = min(max_model_len or folder.max_position_embeddings, blocks * block_size)
    check_length(model.config, examination.calls, longest)
    freeze_rope(model, longest)
    backend = choose_backend(attention, examination, model.dtype, place)
    self_test.check_neighbours(model, longest)
    scratch = partial(_scratch_runner, model, examination, backend, threads=threads)
    self_test.verify(model, self_test.expect(model), scratch(2, self_test.BLOCK_SIZE).logits)
    if deterministic:
        runner = scratch(identity.NUM_BLOCKS, identity.BLOCK_SIZE)
        identity.require(model, runner.cache, runner.logits, vocab_size=runner.limits.vocab_size, max_model_len=longest)
    logger.info(
        "model %s loaded as %s on %s, attention by %s: %d KV blocks of %d tokens, %d bytes a token, sequences up to "
        "%d tokens, %d threads",
        folder.name,
        str(model.dtype).removeprefix("torch."),
        place,
        backend.name,
        blocks,
        block_size,
        shape.bytes_per_token,
        longest,
        threads,
    )
    cache = KVCache(shape, blocks, place)
    attention_backend = backend.make(cache, examination)
    return TorchRunner(model, cache, max_model_len=longest, threads=threads, backend=attention_backend)


def _scratch_runner(
    model: PreTrainedModel,
    examination: Examination,
    backend: BackendChoice,
    num_blocks: int,
    block_size: int,
    *,
    threads: int,
) -> TorchRunner:
    """A runner over a cache of its own, so that what is tried at load leaves nothing behind."""
    shape = KVShape(layers=examination.shapes, dtype=model.dtype, block_size=block_size)
    cache = KVCache(shape, num_blocks, model.device)
    attention_backend = backend.make(cache, examination)
    longest = num_blocks * block_size
    return TorchRunner(model, cache, max_model_len=longest, threads=threads, backend=attention_backend)
