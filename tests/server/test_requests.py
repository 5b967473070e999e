"""Bodies of requests: what is honoured, and that everything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atom.engine.protocol import SamplingParams
from atom.entrypoints.openai.errors import ApiError
from atom.entrypoints.openai.protocol import ChatRequest, CompletionRequest, parse
from atom.entrypoints.openai.validation import (
    chat_sampling,
    check_model,
    check_unsupported,
    completion_sampling,
    seed_of_choice,
    stop_strings,
    template_messages,
)

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    """A parsed and checked completion request."""
    body = {"model": "m", "prompt": "p", **fields}
    request = parse(json.dumps(body).encode(), CompletionRequest)
    check_unsupported(request)
    return request


def chat(**fields: Any) -> ChatRequest:
    """A parsed and checked chat request."""
    body = {"model": "m", "messages": [USER], **fields}
    request = parse(json.dumps(body).encode(), ChatRequest)
    check_unsupported(request)
    return request


def test_sampling_of_a_completion() -> None:
    given = completion(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=-4,
        logprobs=2,
        ignore_eos=True,
        user="someone",
    )
    assert completion_sampling(given, prompt_tokens=3, max_model_len=10) == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=-4, logprobs=2, ignore_eos=True
    )


def test_defaults_are_openai_s() -> None:
    assert completion_sampling(completion(), prompt_tokens=3, max_model_len=100).max_tokens == 16
    assert completion_sampling(completion(), prompt_tokens=97, max_model_len=100).max_tokens == 3
    sampling = chat_sampling(chat(), prompt_tokens=3, max_model_len=100)
    assert sampling == SamplingParams(max_tokens=97, temperature=1.0, top_p=1.0)
    assert chat_sampling(chat(top_k=-1), prompt_tokens=3, max_model_len=9).top_k == 0


def test_log_probabilities() -> None:
    sampling = chat_sampling(chat(logprobs=True), prompt_tokens=1, max_model_len=9)
    assert sampling.logprobs == 0
    sampling = chat_sampling(chat(logprobs=True, top_logprobs=4), prompt_tokens=1, max_model_len=9)
    assert sampling.logprobs == 4
    assert chat_sampling(chat(), prompt_tokens=1, max_model_len=9).logprobs is None
    echo = completion(echo=True, logprobs=0, max_tokens=0)
    sampling = completion_sampling(echo, prompt_tokens=1, max_model_len=9)
    assert (sampling.prompt_logprobs, sampling.logprobs, sampling.max_tokens) == (True, 0, 1)


def test_max_completion_tokens_is_the_newer_name() -> None:
    both = chat(max_tokens=5, max_completion_tokens=5)
    for given in (both, chat(max_tokens=5), chat(max_completion_tokens=5)):
        assert chat_sampling(given, prompt_tokens=1, max_model_len=9).max_tokens == 5


def test_stops() -> None:
    assert stop_strings(completion()) == ()
    assert stop_strings(completion(stop="a")) == ("a",)
    assert stop_strings(completion(stop=["a", "b"])) == ("a", "b")


def test_seeds_of_choices_are_consecutive() -> None:
    seeded = SamplingParams(max_tokens=1, seed=2**63 - 2)
    assert [seed_of_choice(seeded, n) for n in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert seed_of_choice(SamplingParams(max_tokens=1), 1) is None


def test_neutral_values_that_clients_send_change_nothing() -> None:
    limits = {"prompt_tokens": 1, "max_model_len": 99}
    neutral = completion(
        best_of=2,
        n=2,
        suffix=None,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_p=0,
        response_format={"type": "text"},
        stream=False,
    )
    assert completion_sampling(neutral, **limits) == completion_sampling(completion(n=2), **limits)
    neutral = chat(tools=[], tool_choice="none", modalities=["text"], store=False, logit_bias=None)
    assert chat_sampling(neutral, **limits) == chat_sampling(chat(), **limits)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.1}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"top_k": 2**31}, "top_k", str(2**31)),
        ({"n": 0}, "n", "0"),
        ({"n": 1000}, "n", "128"),
        ({"n": True}, "n", "true"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "true"),
        ({"stop": ""}, "stop", ""),
        ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "does not know"),
        ({"presence_penalty": 0.5}, "presence_penalty", "0.5"),
        ({"frequency_penalty": -1}, "frequency_penalty", "-1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "1.1"),
        ({"min_p": 0.1}, "min_p", "0.1"),
        ({"min_tokens": 4}, "min_tokens", "4"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "5"),
        ({"best_of": 3}, "best_of", "3"),
        ({"suffix": "end"}, "suffix", "end"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"guided_regex": "a*"}, "guided_regex", "does not know"),
        ({"prompt": {"a": 1}}, "prompt", '{"a":1}'),
        ({"prompt": [1.5]}, "prompt[0]", "1.5"),
    ],
)
def test_a_bad_completion_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion_sampling(completion(**fields), prompt_tokens=1, max_model_len=100)
    error = json.loads(caught.value.body())["error"]
    assert caught.value.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{**USER, "name": "Ann"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_bad_chat_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        request = chat(**fields)
        template_messages(request.messages)
        chat_sampling(request, prompt_tokens=1, max_model_len=100)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


def test_messages_as_templates_take_them() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            # As the openai client's model_dump() of an earlier answer gives it.
            {
                "role": "assistant",
                "content": "c",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
        ]
    )
    assert template_messages(request.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model":"m","prompt":"x","tools":' + b"[" * 5000, "not JSON|does not know"),
        (b'{"model":"m","prompt":"x","n":"3",', "n: expected int"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b'{"prompt":"\xff"}', "not JSON"),
    ],
)
def test_a_body_that_is_no_object(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        parse(body, CompletionRequest)
    assert caught.value.status == 400


def test_deep_nesting_is_refused() -> None:
    body = b'{"model":"m","messages":[],"tools":' + b"[" * 10**5 + b"]" * 10**5 + b"}"
    with pytest.raises(ApiError) as caught:
        parse(body, ChatRequest)
    assert caught.value.status == 400


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="prompt") as caught:
        parse(b'{"model": "m"}', CompletionRequest)
    assert caught.value.param == "prompt"
    assert caught.value.code == "missing_required_parameter"


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt="x", top_p="y" * 10_000)
    assert len(caught.value.message) < 200


def test_the_context_length_names_both_numbers() -> None:
    given = completion(max_tokens=8)
    assert completion_sampling(given, prompt_tokens=92, max_model_len=100).max_tokens == 8
    with pytest.raises(ApiError) as caught:
        completion_sampling(given, prompt_tokens=93, max_model_len=100)
    assert caught.value.status == 400
    assert caught.value.code == "context_length_exceeded"
    for number in ("100", "101", "93", "8"):
        assert f" {number} " in caught.value.message.replace("(", " ")
    with pytest.raises(ApiError) as caught:
        chat_sampling(chat(), prompt_tokens=100, max_model_len=100)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


def test_another_model_is_404() -> None:
    with pytest.raises(ApiError) as caught:
        check_model(completion(), "other")
    assert caught.value.status == 404
    assert caught.value.code == "model_not_found"
    check_model(completion(), "m")
