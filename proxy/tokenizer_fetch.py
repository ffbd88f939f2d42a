"""Tokenizers, fetched once per fingerprint from a worker that registered it, checked and loaded in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from concurrent.futures import Executor
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from prefixcache.errors import WorkerFault
from prefixcache.limits import CONNECT_TIMEOUT_S, MAX_TOKENIZER_BYTES, TOKENIZER_FETCH_TIMEOUT_S
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizer_files import TOKENIZER_FILE_NAMES, TokenizerFiles

_MAX_MANIFEST_BYTES = 64 * 1024
_logger = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What GET /tokenizer/manifest answers."""

    fingerprint: str
    files: dict[str, int]
    """Name -> bytes."""


async def fetch_tokenizer_files(client: aiohttp.ClientSession, address: str, fingerprint: str) -> TokenizerFiles:
    """Raises WorkerFault unless the worker gives the files of this very fingerprint within the limits."""
    base = f"http://{address}/tokenizer"
    try:
        manifest = msgspec.json.decode(await _read(client, f"{base}/manifest", _MAX_MANIFEST_BYTES), type=Manifest)
        if not set(manifest.files).issubset(TOKENIZER_FILE_NAMES):
            raise WorkerFault(f"tokenizer of {address} has files of other names than {', '.join(TOKENIZER_FILE_NAMES)}")
        if sum(manifest.files.values()) > MAX_TOKENIZER_BYTES:
            raise WorkerFault(f"tokenizer of {address} is over the limit of {MAX_TOKENIZER_BYTES} bytes")
        files = {name: await _read(client, f"{base}/files/{name}", size) for name, size in manifest.files.items()}
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise WorkerFault(f"tokenizer of {address} could not be fetched: {error or type(error).__name__}") from error
    fetched = TokenizerFiles(files=files)
    if fetched.fingerprint != fingerprint:
        raise WorkerFault(
            f"tokenizer of {address} has the fingerprint {fetched.fingerprint[:16]}, registered was {fingerprint[:16]}"
        )
    return fetched


async def _read(client: aiohttp.ClientSession, url: str, max_bytes: int) -> bytes:
    async with client.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise WorkerFault(f"{url} answered {answer.status}")
        data = bytearray()
        async for piece in answer.content.iter_any():
            data += piece
            if len(data) > max_bytes:
                raise WorkerFault(f"{url} is longer than announced")
        return bytes(data)


class Tokenizers:
    """Renderers by fingerprint. A fetch that failed is tried again by the next caller."""

    def __init__(self, client: aiohttp.ClientSession, executor: Executor) -> None:
        self._client = client
        self._executor = executor
        self._loading: dict[str, asyncio.Task[Renderer]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, executor: Executor) -> AsyncIterator[Tokenizers]:
        timeout = aiohttp.ClientTimeout(total=TOKENIZER_FETCH_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            tokenizers = cls(client, executor)
            try:
                yield tokenizers
            finally:
                await tokenizers._close()

    async def renderer(self, fingerprint: str, address: str) -> Renderer:
        """The renderer for this tokenizer. Raises WorkerFault or ConfigError."""
        task = self._loading.get(fingerprint)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._load(fingerprint, address))
            self._loading[fingerprint] = task
        return await asyncio.shield(task)

    def keep_only(self, fingerprints: Collection[str]) -> None:
        """Forgets the others, loaded or on their way."""
        for fingerprint in [known for known in self._loading if known not in fingerprints]:
            self._loading.pop(fingerprint).cancel()

    async def _load(self, fingerprint: str, address: str) -> Renderer:
        files = await fetch_tokenizer_files(self._client, address, fingerprint)
        renderer = await asyncio.get_running_loop().run_in_executor(self._executor, Renderer, files)
        _logger.info("tokenizer %s loaded from %s", fingerprint[:16], address)
        return renderer

    async def _close(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
