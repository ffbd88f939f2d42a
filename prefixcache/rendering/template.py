"""A model's chat template: foreign Jinja code in a sandbox, with the environment that transformers 5 gives it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixcache.errors import ConfigError, InvalidRequest
from prefixcache.limits import MAX_PROMPT_CHARS
from prefixcache.rendering.control_tokens import marks_in_ascii_json, unmark

_MESSAGE_CHARS = 300
"""Most characters of a template's own message that a client is shown."""

_DATE_FUNCTION = "strftime_now"
_PROBE = "probe"

logger = logging.getLogger(__name__)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012  (declared as an instance variable by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _SafeDict:
    """`dict` for templates, without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _SafeNamespace(jinja2.utils.Namespace):
    """`namespace` for templates, without underscore names, which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja2
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store the attribute {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return marks_in_ascii_json(text) if ensure_ascii else text


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment


class ChatTemplate:
    """One compiled template. Raises ConfigError for source that is no template."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is wrong at line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self.prints_date = any(node.name == _DATE_FUNCTION for node in tree.find_all(jinja2.nodes.Name))
        """Whether its text changes with the day, and every cached prefix with it."""
        literals = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
        literals |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self.literals = frozenset(literals)
        """Everything the template can write of its own accord, in pieces."""
        self.reserved_names = frozenset({*environment.globals, _DATE_FUNCTION})
        """Functions of the environment, which no argument may replace."""

    def takes_parts(self, special_tokens: Mapping[str, str]) -> bool:
        """Whether a message's content may be a list of text parts: found out by rendering one in both forms."""
        plain, parted = [
            self._probe(special_tokens, {"role": "user", "content": content})
            for content in (_PROBE, [{"type": "text", "text": _PROBE}])
        ]
        return plain is not None and plain == parted

    def takes_argument_objects(self, special_tokens: Mapping[str, str]) -> bool:
        """Whether the arguments of a tool call may be an object: most templates want one, a few join its JSON text."""
        call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {_PROBE: _PROBE}}}
        user = {"role": "user", "content": _PROBE}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._probe(special_tokens, user, assistant) is not None

    def _probe(self, special_tokens: Mapping[str, str], *messages: Mapping[str, Any]) -> str | None:
        """The text of a chat that nobody sent; None if the template refuses it."""
        variables = {
            **special_tokens,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            _DATE_FUNCTION: datetime.min.strftime,
        }
        try:
            return self._template.render(variables)
        except Exception:  # foreign code that takes no such thing, in whatever way it says so
            return None

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """The text for one request; `now` is the request's date.

        Raises InvalidRequest with the template's own message where it refuses the chat, and for whatever else foreign
        code comes to on a caller's data, above all data of another shape than it expects.
        """
        chunks: list[str] = []
        num_chars = 0
        try:
            for chunk in self._template.generate({**variables, _DATE_FUNCTION: now.strftime}):
                num_chars += len(chunk)
                if num_chars > MAX_PROMPT_CHARS:
                    raise _refusal(f"the rendered prompt is over the limit of {MAX_PROMPT_CHARS} characters")
                chunks.append(chunk)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise _refusal(error.message or type(error).__name__) from error
        except RecursionError as error:
            raise _refusal("the messages or tools are nested too deeply for the chat template") from error
        except Exception as error:
            logger.info("chat template failed on a request", exc_info=True)
            raise _refusal(f"the chat template cannot render these messages: {error}") from error
        return "".join(chunks)


def _refusal(message: str) -> InvalidRequest:
    message = unmark(message).text
    if len(message) > _MESSAGE_CHARS:
        message = message[: _MESSAGE_CHARS - 3] + "..."
    return InvalidRequest(message, param="messages")
