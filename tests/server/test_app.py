"""The application before any rank is ready: routes, keys, bodies, and every error in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerFast

from atom.engine.router import Router
from atom.entrypoints.openai.app import build_app
from atom.entrypoints.openai.args import ServerArgs
from atom.entrypoints.openai.chat import render
from atom.entrypoints.openai.context import Context
from atom.entrypoints.openai.detokenize import Vocabulary
from atom.entrypoints.openai.errors import ApiError
from atom.entrypoints.openai.metrics import Metrics
from atom.entrypoints.openai.tokenizer import ModelText, load_model_text
from atom.errors import LaunchRefused

KEY = {"authorization": "Bearer secret"}
GOOD = {"model": "m", "prompt": "x"}


@pytest.fixture
def context() -> Iterator[Context]:
    metrics = Metrics()
    router = Router(2, max_queue=4, on_failed=lambda failed: None)
    metrics.watch(router)
    args = ServerArgs(model="m", api_key="secret")
    yield Context(args=args, router=router, metrics=metrics, max_body_bytes=1000, created=1)


@pytest.fixture
def client(context: Context) -> TestClient:
    return TestClient(build_app(context), headers=KEY, raise_server_exceptions=False)


def error_of(response: Any) -> dict[str, Any]:
    """The error object, after checking its shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def counted(context: Context) -> dict[tuple[str, str], float]:
    """Requests by endpoint and status, as a scraper reads them."""
    families = text_string_to_metric_families(context.metrics.text().decode())
    return {
        (s.labels["endpoint"], s.labels["status"]): s.value
        for family in families
        for s in family.samples
        if s.name == "atom_requests_total"
    }


def test_while_starting(client: TestClient) -> None:
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "starting"})
    for path, body in (
        ("/v1/completions", GOOD),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 503
        assert error_of(response)["code"] == "starting"
    version = client.get("/version").json()
    assert version["wire"] is None
    assert version["torch"].startswith("2.")
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("m", None)
    assert client.get("/v1/models/m").json()["id"] == "m"


def test_a_probe_may_ask_for_the_head_only(client: TestClient) -> None:
    head, whole = client.head("/health"), client.get("/health")
    assert (head.status_code, head.content) == (503, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


def test_draining_and_failed(client: TestClient, context: Context) -> None:
    context.draining = True
    assert client.get("/health").json() == {"status": "draining"}
    assert error_of(client.post("/v1/completions", json=GOOD))["code"] == "draining"
    context.router.fail("rank 1 was ended by SIGKILL")
    health = client.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "failed", "error": "rank 1 was ended by SIGKILL"}
    response = client.post("/v1/completions", json=GOOD)
    assert response.status_code == 503
    assert "rank 1 was ended by SIGKILL" in error_of(response)["message"]


def test_the_key(client: TestClient) -> None:
    for header in ("", "Bearer", "Bearer wrong", "Basic secret", "Bearer secretsecret", "secret"):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/no")):
            response = client.request(method, path, headers={"authorization": header})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/health", headers={"authorization": ""}).status_code == 503
    assert client.get("/metrics", headers={"authorization": ""}).status_code == 200
    assert client.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200


def test_unknown_paths_and_methods(client: TestClient) -> None:
    response = client.get("/v1/embeddings")
    assert response.status_code == 404
    assert "/v1/completions" in error_of(response)["message"]
    response = client.get("/v1/completions")
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    response = client.get("/v1/models/other")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_bodies_that_are_not_read(client: TestClient) -> None:
    text = client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 415
    assert "text/plain" in error_of(text)["message"]
    json_ = {"content-type": "application/json; charset=utf-8"}
    assert client.post("/v1/completions", content=b"{", headers=json_).status_code == 400
    # Announced and, in chunks, not announced.
    for content in (b" " * 1001, (b" " * 500 for _ in range(3))):
        response = client.post("/v1/completions", content=content, headers=json_)
        assert response.status_code == 413
        assert "1000" in error_of(response)["message"]
    body = b'{"model":"m","prompt":"x"}'.ljust(1000)
    assert client.post("/v1/completions", content=body, headers=json_).status_code == 503


def test_bad_values_are_refused_even_while_starting(client: TestClient) -> None:
    response = client.post("/v1/completions", json={**GOOD, "temperature": 9})
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"
    response = client.post("/v1/completions", json={**GOOD, "model": "gpt-5"})
    assert response.status_code == 404
    assert "gpt-5" in error_of(response)["message"]
    for prompt in ([], ["a", 1], [[1], 2]):
        response = client.post("/v1/completions", json={"model": "m", "prompt": prompt})
        assert error_of(response)["param"] == "prompt"


def test_an_unforeseen_error_keeps_the_shape(client: TestClient, context: Context) -> None:
    context.max_body_bytes = "broken"  # type: ignore[assignment]
    response = client.post("/v1/completions", json=GOOD)
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "broken" not in response.text
    assert counted(context)["/v1/completions", "500"] == 1


def test_requests_are_counted_by_endpoint_and_status(client: TestClient, context: Context) -> None:
    for path in ("/health", "/nope", "/also/nope", "/v1/models"):
        client.get(path)
    client.get("/v1/models", headers={"authorization": "Bearer x"})
    assert counted(context) == {
        ("/health", "503"): 1,
        ("other", "404"): 2,
        ("/v1/models", "200"): 1,
        ("/v1/models", "401"): 1,
    }


def test_the_openapi_document_has_the_bodies(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert field in body["schema"]["properties"]
        assert "$ref" not in str(body)


def bundled() -> ModelText:
    """The bundled model's tokenizer."""
    return load_model_text(files("atom") / "assets" / "tiny_moe")  # type: ignore[arg-type]


def test_the_chat_template() -> None:
    text = bundled()
    assert text.vocab_size == 5120
    rendered = render([{"role": "user", "content": "hi"}], text)
    assert rendered.endswith("assistant\n")
    assert "hi" in rendered


def test_a_tokenizer_without_a_chat_template() -> None:
    backend = bundled().tokenizer.backend_tokenizer
    plain = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ApiError, match="no chat template") as caught:
        render([{"role": "user", "content": "hi"}], ModelText(plain, Vocabulary(backend), 10))
    assert caught.value.status == 400


def test_a_template_that_refuses() -> None:
    text = bundled()
    text.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        render([{"role": "user", "content": "hi"}], text)
    assert caught.value.status == 400


def test_a_model_without_a_tokenizer(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 5}')
    with pytest.raises(LaunchRefused, match=r"tokenizer\.json"):
        load_model_text(tmp_path)
