"""Which requests can be answered from the cache, and under which key.

A key is a digest of everything that can change the answer, and of nothing else. BLAKE2b (RFC 7693) is cryptographic: a
caller who chooses a body cannot make it collide with another's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import orjson

from .entry import DIGEST_BYTES, tag

Policy = Literal["deterministic", "all", "opt-in"]
Sharing = Literal["tenant", "subject", "shared"]

KEY_FORMAT = 1
OWNERS = 10_000  # whose tags are remembered

# What tells who asks, or how the answer is to travel, and leaves it as it is. `model` stands in the key by itself.
IGNORED = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "request_id",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_salt",
        "priority",
    }
)

# Fields with these values mean the same as without them. Temperature, top_p, and other ways to sample are not here:
# when they are left out, vLLM takes them from the model's generation_config.json.
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "store": False,
    "echo": False,
    "parallel_tool_calls": True,
    "tool_choice": "auto",  # where there are tools; without, it has no meaning
    "response_format": {"type": "text"},
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "use_beam_search": False,
    "include_reasoning": True,
    "return_token_ids": False,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "logit_bias": {},
    "tools": [],
    "modalities": ["text"],
    "suffix": "",
}
# `logprobs: 0` of a completion asks for the chosen token's, so only the chat's false is a default.
CHAT_DEFAULTS: dict[str, Any] = {**DEFAULTS, "logprobs": False, "top_logprobs": 0}
# With temperature 0 the most probable token is taken, whatever these say.
SAMPLING_ONLY = ("top_p", "top_k", "min_p")
ABSENT = object()


class Question(NamedTuple):
    """A request, as far as its key goes. `model` is the public name, `revision` stands for all that is behind it;
    `body` is the decoded request without nulls at its top; `asks` says that the caller asked for caching."""

    operation: str
    body: Mapping[str, Any]
    model: str
    revision: str
    tenant: str
    subject: str
    asks: bool = False


@dataclass(frozen=True, slots=True)
class KeyMaker:
    """`policy` says which answers are cached, `sharing` who shares them."""

    policy: Policy = "deterministic"
    sharing: Sharing = "tenant"

    def obstacle(self, question: Question) -> str | None:
        """Why this request is not answered from the cache, nor stored in it; None: it can be."""
        body = question.body
        if has_side_effects(body):
            return "side effects"
        if self.policy == "opt-in" and not question.asks:
            return "not asked for"
        if is_determined(body):
            return None
        if self.policy != "all":
            return "temperature>0"
        return "n>1 without a seed" if body.get("n", 1) != 1 else None

    def key(self, question: Question) -> bytes:
        """The tag of the tenant, the tag of the model, the digest."""
        owner = self._owner(question)
        context = _context(*owner, question.operation, question.model, question.revision)
        return context.tags + _digest(context.digested, question)

    def private_key(self, question: Question) -> bytes:
        """A key that only the same caller's same request has, whatever is shared."""
        context = _context(question.tenant, question.subject, question.operation, question.model, question.revision)
        return context.tags + _digest(context.digested, question)

    def _owner(self, question: Question) -> tuple[str | None, str | None]:
        if self.sharing == "shared":
            return None, None
        return question.tenant, question.subject if self.sharing == "subject" else None


def canonical(operation: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that can change the answer, each value in one form: no nulls, no defaults, 1.0 as 1, a single stop as
    a list. The order of keys is left to the serialisation."""
    is_chat = operation == "chat.completions"
    defaults = CHAT_DEFAULTS if is_chat else DEFAULTS
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if type(value) is float and value.is_integer():
            value = int(value)
        default = defaults.get(name, ABSENT)
        if default is not ABSENT and type(value) is type(default) and value == default:
            continue
        fields[name] = value
    if type(fields.get("stop")) is str:
        fields["stop"] = [fields["stop"]]
    if is_chat:
        if "max_tokens" in fields:
            fields.setdefault("max_completion_tokens", fields.pop("max_tokens"))
        messages = fields.get("messages")
        if type(messages) is list:
            fields["messages"] = [_without_nulls(message) for message in messages]
    if fields.get("temperature") == 0:
        for name in SAMPLING_ONLY:
            fields.pop(name, None)
    if "tools" not in fields and fields.get("tool_choice") == "none":
        del fields["tool_choice"]
    return fields


def is_determined(body: Mapping[str, Any]) -> bool:
    """Whether the request has one answer: nothing is drawn, or from a seed. (vLLM takes -1 for no seed.)"""
    temperature, seed = body.get("temperature"), body.get("seed")
    if type(temperature) in (int, float) and temperature == 0:
        return True
    return type(seed) is int and seed != -1


def has_side_effects(body: Mapping[str, Any]) -> bool:
    """Whether more is asked for than an answer: storing it, a search, a tool that the server runs, moving KV blocks."""
    if body.get("store") or body.get("background") or "web_search_options" in body or "kv_transfer_params" in body:
        return True
    tools = body.get("tools")
    if not tools or type(tools) is not list:
        return False
    return not all(type(tool) is dict and tool.get("type") in ("function", "custom") for tool in tools)


class _Context(NamedTuple):
    tags: bytes
    digested: bytes


@lru_cache(OWNERS)
def _context(tenant: str | None, subject: str | None, operation: str, model: str, revision: str) -> _Context:
    """What the key has of the caller, the model, and the operation. JSON keeps the parts apart, whatever is in them."""
    parts = [KEY_FORMAT, tenant, subject, operation, model, revision]
    return _Context(tag("" if tenant is None else tenant) + tag(model), orjson.dumps(parts))


def _digest(context: bytes, question: Question) -> bytes:
    fields = orjson.dumps(canonical(question.operation, question.body), option=orjson.OPT_SORT_KEYS)
    return blake2b(context + fields, digest_size=DIGEST_BYTES).digest()


def _without_nulls(message: Any) -> Any:
    if type(message) is dict and None in message.values():
        return {name: value for name, value in message.items() if value is not None}
    return message
