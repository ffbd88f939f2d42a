"""A loaded tokenizer and the sets of added tokens that rendering asks about."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from prefixcache.errors import ConfigError
from prefixcache.rendering.mid_text import MidTextEncoder, spelling_ids
from prefixcache.rendering.tokenizer_config import TokenizerConfig
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer, safe to share between threads because nothing on it is changed after loading."""

    tokenizer: Tokenizer
    vocab_size: int
    """One more than the highest id."""
    added: frozenset[str]
    """Spellings that the tokenizer takes out of a text before anything else."""
    control: frozenset[str]
    """Those of them that a caller's text must not turn into: every special one, and what the templates write."""
    control_ids: frozenset[int]
    hard_borders: frozenset[str]
    """Special tokens whose neighbours can be encoded apart from them."""
    has_normalized_control: bool
    """Whether other spellings than the one given may turn into a control token."""
    mid_text: MidTextEncoder
    spelling_ids: Mapping[str, array[int]]
    """Ids of each control spelling where it is a caller's, and so plain text."""

    @classmethod
    def load(cls, files: TokenizerFiles, config: TokenizerConfig, template_literals: Collection[str]) -> Vocabulary:
        """Raises ConfigError unless the tokenizers library accepts the file."""
        tokenizer = _load_tokenizer(files)
        # A special token that the configuration names and tokenizer.json forgot must not be spelled by callers either.
        listed = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        unlisted = {name for name in config.special_tokens.values() if tokenizer.token_to_id(name) is not None} - listed
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sorted(unlisted)])

        decoder = tokenizer.get_added_tokens_decoder()
        tokens = {token.content: token for token in decoder.values() if token.content}
        control = {
            name: token for name, token in tokens.items() if token.special or _is_written(name, template_literals)
        }
        control_ids = frozenset(id for id, token in decoder.items() if token.content in control)
        mid_text = MidTextEncoder(tokenizer)
        return cls(
            tokenizer=tokenizer,
            vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            added=frozenset(tokens),
            control=frozenset(control),
            control_ids=control_ids,
            hard_borders=frozenset(name for name, token in control.items() if _is_hard_border(token)),
            has_normalized_control=any(token.normalized for token in control.values())
            and tokenizer.normalizer is not None,
            mid_text=mid_text,
            spelling_ids=spelling_ids(tokenizer, mid_text, control, control_ids),
        )


def _load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(files.files[TOKENIZER_JSON])
    except Exception as error:  # the library raises bare Exception and ValueError
        raise ConfigError(f"{TOKENIZER_JSON} cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_written(name: str, template_literals: Collection[str]) -> bool:
    # Some vocabularies add tokens of blanks; those are ordinary text wherever they stand.
    return not name.isspace() and any(name in literal for literal in template_literals)


def _is_hard_border(token: AddedToken) -> bool:
    # rstrip swallows blanks of what follows; single_word looks at its neighbours; a normalized token is matched late.
    return token.special and not (token.rstrip or token.single_word or token.normalized)
