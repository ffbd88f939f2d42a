"""What the index blocks of one prompt are worth in tokens of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.types import EngineGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGeometry:
    """A `Geometry`: an engine's, with what is known or learnt of the tokens in a unit of this prompt."""

    engine: EngineGeometry
    tokens_per_unit: float

    @property
    def index_block_tokens(self) -> float:
        return self.engine.index_block_units * self.tokens_per_unit

    @property
    def engine_blocks_per_index_block(self) -> float:
        return self.index_block_tokens / self.engine.block_size

    def predicted_hit_tokens(self, matched_index_blocks: int, prompt_tokens: int) -> int:
        return self.engine.predicted_hit_tokens(
            matched_index_blocks, prompt_tokens, tokens_per_unit=self.tokens_per_unit
        )
