"""Keys: the same for what asks the same, another for whatever can change the answer."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from cache.entry import KEY_BYTES, tag
from cache.key import KeyMaker, Question, canonical

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "high"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]},
    ],
    "temperature": 0,
    "max_tokens": 20,
    "stop": ["a", "b"],
    "seed": 7,
    "logit_bias": {"50": 3},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    "tools": [TOOL],
    "tool_choice": "required",
    "chat_template_kwargs": {"enable_thinking": False},
}


def key(body: dict[str, Any], **changes: Any) -> bytes:
    sharing = changes.pop("sharing", "tenant")
    question = Question("chat.completions", body, "demo", "r1", "acme", "ann")._replace(**changes)
    return KeyMaker("deterministic", sharing).key(question)


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        names = list(value)
        random.shuffle(names)
        return {name: shuffled(value[name]) for name in names}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


def changed(**fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields}


def test_order_of_fields_does_not_matter() -> None:
    assert {key(shuffled(CHAT)) for _ in range(20)} == {key(CHAT)}


@pytest.mark.parametrize(
    "more",
    [
        {"user": "u", "metadata": {"a": 1}, "stream": True, "stream_options": {"include_usage": True}},
        {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False, "top_logprobs": 0},
        {"parallel_tool_calls": True, "store": False, "skip_special_tokens": True, "min_tokens": 0},
        {"top_p": 0.3, "top_k": 5, "min_p": 0.1},  # with temperature 0 the most probable token is taken all the same
        {"temperature": 0.0, "max_tokens": 20.0, "cache_salt": "x", "priority": 3, "request_id": "r"},
        {"stop_token_ids": [], "bad_words": [], "echo": False, "suffix": None, "service_tier": "auto"},
        {"max_tokens": None, "max_completion_tokens": 20},
    ],
)
def test_what_cannot_change_the_answer_does_not_change_the_key(more: dict[str, Any]) -> None:
    body = {name: value for name, value in {**CHAT, **more}.items() if value is not None}
    assert key(body) == key(CHAT)


def test_nulls_in_messages_and_a_single_stop_are_the_same() -> None:
    body = {**CHAT, "messages": [{**message, "name": None, "tool_calls": None} for message in CHAT["messages"]]}
    assert key(body) == key(CHAT)
    assert key(changed(stop="a")) == key(changed(stop=["a"]))


OTHERS = [
    changed(messages=[*CHAT["messages"], {"role": "user", "content": "x"}]),
    changed(messages=[CHAT["messages"][0], {"role": "user", "content": "What is it?"}]),
    json.loads(json.dumps(CHAT).replace("a.png", "b.png")),
    json.loads(json.dumps(CHAT).replace('"high"', '"low"')),
    changed(tools=[TOOL, {**TOOL, "function": {"name": "g"}}]),
    json.loads(json.dumps(CHAT).replace('"x": {}', '"y": {}')),
    changed(tool_choice="auto"),
    changed(stop=["b", "a"]),
    changed(stop=["a"]),
    changed(logit_bias={"50": 4}),
    changed(logit_bias={"51": 3}),
    changed(response_format={"type": "json_object"}),
    changed(seed=8),
    changed(chat_template_kwargs={"enable_thinking": True}),
    changed(max_tokens=21),
    changed(temperature=0.5),
    changed(temperature=0.5, top_p=0.5),
    changed(n=2),
    changed(logprobs=True),
    changed(logprobs=True, top_logprobs=2),
    changed(structured_outputs={"choice": ["a"]}),
    changed(guided_choice=["a"]),
    changed(repetition_penalty=1.1),
    changed(a_field_of_the_future=1),
]


def test_whatever_can_change_the_answer_changes_the_key() -> None:
    keys = [key(CHAT), *map(key, OTHERS)]
    keys += [key(CHAT, model="demo-lora"), key(CHAT, revision="r2"), key(CHAT, operation="completions")]
    keys += [key(CHAT, tenant="other")]
    assert len(set(keys)) == len(keys) == len(OTHERS) + 5


def test_scope_says_who_shares() -> None:
    def owners(sharing: str) -> int:
        callers = [("acme", "ann"), ("acme", "bob"), ("other", "ann")]
        return len({key(CHAT, tenant=tenant, subject=subject, sharing=sharing) for tenant, subject in callers})

    assert (owners("tenant"), owners("subject"), owners("shared")) == (2, 3, 1)
    # Parts are kept apart, whatever is in them.
    assert key(CHAT, tenant='a","b') != key(CHAT, tenant="a", subject='b"')


def test_tags_tell_tenant_and_model() -> None:
    made = key(CHAT)
    assert len(made) == KEY_BYTES
    assert made.startswith(tag("acme") + tag("demo"))


def test_key_is_the_same_in_another_process() -> None:
    code = (
        "import json, sys; from cache.key import *; body = json.load(sys.stdin);"
        "print(KeyMaker().key(Question('chat.completions', body, 'demo', 'r1', 'acme', 'ann')).hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(CHAT), capture_output=True, text=True)
    assert done.stdout.strip() == key(CHAT).hex()


def test_canonical_fields_are_what_is_left() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.0, "n": 1, "user": "u", "top_p": 1}
    assert canonical("chat.completions", body) == {"messages": body["messages"], "temperature": 0}
    assert canonical("completions", {"prompt": "x", "logprobs": 0, "seed": 1}) == {
        "prompt": "x",
        "logprobs": 0,
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("policy", "body", "obstacle"),
    [
        ("deterministic", {"temperature": 0}, None),
        ("deterministic", {"temperature": 0.0}, None),
        ("deterministic", {"seed": 1}, None),
        ("deterministic", {"temperature": 1, "seed": 0}, None),
        ("deterministic", {"seed": -1}, "temperature>0"),
        ("deterministic", {}, "temperature>0"),
        ("deterministic", {"temperature": 0.1}, "temperature>0"),
        ("deterministic", {"temperature": False}, "temperature>0"),
        ("deterministic", {"seed": True}, "temperature>0"),
        ("deterministic", {"n": 2, "temperature": 0.5}, "temperature>0"),
        ("deterministic", {"n": 2, "seed": 3}, None),
        ("all", {"temperature": 1}, None),
        ("all", {"temperature": 1, "n": 2}, "n>1 without a seed"),
        ("all", {"temperature": 1, "n": 2, "seed": 3}, None),
        ("opt-in", {"temperature": 0}, "not asked for"),
        ("all", {"temperature": 0, "store": True}, "side effects"),
        ("all", {"temperature": 0, "web_search_options": {}}, "side effects"),
        ("all", {"temperature": 0, "tools": [{"type": "mcp"}]}, "side effects"),
        ("all", {"temperature": 0, "tools": [TOOL]}, None),
        ("all", {"temperature": 0, "kv_transfer_params": {"x": 1}}, "side effects"),
    ],
)
def test_what_is_cached(policy: Any, body: dict[str, Any], obstacle: str | None) -> None:
    question = Question("chat.completions", {"messages": [], **body}, "demo", "", "acme", "ann")
    assert KeyMaker(policy).obstacle(question) == obstacle


def test_opt_in_takes_those_who_ask() -> None:
    question = Question("chat.completions", {"messages": [], "temperature": 0}, "demo", "", "acme", "ann", asks=True)
    assert KeyMaker("opt-in").obstacle(question) is None
    assert KeyMaker("opt-in").obstacle(question._replace(body={"temperature": 1})) == "temperature>0"


@pytest.mark.parametrize(
    "body", [{"messages": 5}, {"messages": [1, None]}, {"stop": 3}, {"temperature": "0"}, {"n": [1]}, {"tools": 7}]
)
def test_malformed_bodies_have_a_key_like_any_other(body: dict[str, Any]) -> None:
    maker = KeyMaker("all")
    question = Question("chat.completions", body, "demo", "", "acme", "ann")
    maker.obstacle(question)
    assert len(maker.key(question)) == KEY_BYTES
