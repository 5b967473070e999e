"""Serving on a GPU: decode graphs give what eager steps give, requests sample as they asked, and a real server answers."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install 'atom[gpu]')")

from atom.engine import loading
from atom.engine.batching import BatchLimits, ContinuousBatcher
from atom.engine.norms import use_fused_norms
from atom.engine.protocol import SamplingParams
from atom.engine.rotary_triton import use_fused_rotary
from atom.moe.mega_moe import create_mega_moe, resolve_choice
from atom.moe.model_config import describe
from tests.server.running import RunningServer

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": 4095,
}
LIMITS = BatchLimits(
    max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=512, kv_tokens=20000
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def model(folder):
    device = torch.device("cuda", 0)
    config = loading.load_config(folder)
    geometry, recipe = describe(config, ep_size=1, ep_rank=0, max_tokens=512)
    choice = resolve_choice(recipe, device=device)
    mega = create_mega_moe(geometry, recipe, choice, group=None, device=device)
    built = loading.load_model(folder, config, mega, load_format="dummy", device=device)
    assert use_fused_norms(built) and use_fused_rotary(built)
    return built


def answer(batcher, requests):
    """Tokens and log probabilities of each of ``(prompt, params)``."""
    tokens, logprobs = {}, {}
    for i, (prompt, params) in enumerate(requests):
        batcher.add(str(i), prompt, params)
    with torch.inference_mode():
        while batcher.has_requests:
            assert batcher.prepare()
            for output in batcher.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
    count = range(len(requests))
    return [tokens[str(i)] for i in count], [logprobs[str(i)] for i in count]


def prompts(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [torch.randint(0, 4000, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_graphs_give_the_tokens_of_eager_steps(model, count):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts(count)]
    eager, _ = answer(ContinuousBatcher(model, LIMITS, []), requests)
    batcher = ContinuousBatcher(model, LIMITS, [], graphs=True)
    batcher.warm_up()
    assert batcher.captured_graphs == 5
    # The second time every decode step is a replay, on pages that others have used.
    for _ in range(2):
        assert answer(batcher, requests)[0] == eager
    assert len({tuple(tokens) for tokens in eager}) == count


def test_scheduling_ahead_changes_no_token(model):
    """Requests end by a token and by length, one is cancelled and others arrive while a step is scheduled ahead; there are
    always more than eight, so that every step is padded to sixteen rows."""
    base = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain, _ = answer(ContinuousBatcher(model, LIMITS, []), [(p, base) for p in prompts(16)])

    def run(ahead):
        batcher = ContinuousBatcher(model, LIMITS, [], graphs=True)
        batcher.warm_up()
        prepared = []
        if not ahead:
            batcher._runner.while_running = lambda: None
        tokens, reasons = {}, {}
        for i, prompt in enumerate(prompts(16)):
            stop = (plain[i][7 + i],) if i < 4 else ()
            length = 15 + i if i < 6 else 40
            params = SamplingParams(
                max_tokens=length, temperature=0, ignore_eos=True, stop_token_ids=stop
            )
            batcher.add(str(i), prompt, params)
        step = 0
        with torch.inference_mode():
            while batcher.has_requests:
                assert batcher.prepare()
                for output in batcher.step():
                    tokens.setdefault(output.request_id, []).extend(output.token_ids)
                    reasons[output.request_id] = output.finish_reason
                prepared.append(batcher._ahead)
                step += 1
                if step == 9:
                    batcher.cancel("15")
                if step in (20, 21):
                    late = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
                    batcher.add(f"late {step}", prompts(2)[1], late)
        assert batcher.stats().running == 0
        return tokens, reasons, sum(prepared)

    expected, expected_reasons, none = run(ahead=False)
    tokens, reasons, some = run(ahead=True)
    assert none == 0 and some > 25
    assert reasons == expected_reasons
    assert {reasons[str(i)] for i in range(4)} == {"stop"}
    assert tokens == expected
    assert len(tokens["late 20"]) == 14 and len(tokens["15"]) == 9


def test_a_padded_batch_gives_the_tokens_of_requests_alone(model):
    """Padding rows change no request: eleven requests run in a graph of sixteen rows."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    batcher = ContinuousBatcher(model, LIMITS, [], graphs=True)
    requests = [(prompt, params) for prompt in prompts(11)]
    together, _ = answer(batcher, requests)
    filled, _ = answer(batcher, requests + [([7], params)] * 5)
    assert together == filled[:11]


def test_each_request_samples_as_it_asked(model):
    batcher = ContinuousBatcher(model, LIMITS, [], graphs=True)
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    nucleus = SamplingParams(
        max_tokens=12, temperature=0.8, top_p=0.5, seed=4, ignore_eos=True, logprobs=0
    )
    first = SamplingParams(max_tokens=12, temperature=2.0, top_k=1, seed=5, ignore_eos=True)
    prompt = prompts(1)[0]
    requests = [(prompt, params) for params in (greedy, seeded, nucleus, first)]
    tokens, logprobs = answer(batcher, requests)
    assert answer(batcher, requests)[0] == tokens
    assert tokens[3] == tokens[0] != tokens[1]
    assert len(logprobs[0]) == len(logprobs[2]) == 12 and not logprobs[1]
    for token, logprob in zip(tokens[0], logprobs[0], strict=True):
        assert logprob.token_id == token == logprob.top[0][0]
        assert logprob.logprob == logprob.top[0][1] <= 0
        assert len(logprob.top) == 3


def test_a_real_server_answers_two_requests(folder, tmp_path):
    server = RunningServer(
        tmp_path,
        *("--device", "cuda", "--load-format", "dummy", "--max-num-seqs", "4"),
        model=str(folder),
    )
    try:
        client = server.wait_healthy().client()
        for text in ("hello", "a longer prompt than that"):
            answer = client.completions.create(
                model=str(folder), prompt=text, max_tokens=20, extra_body={"ignore_eos": True}
            )
            assert answer.usage.completion_tokens == 20
        assert "dispatch=local" in server.log
        assert "GPU memory:" in server.log
        metrics = server.metrics()
        assert metrics.sum("atom_generation_tokens_total") == 40
        calls = metrics.sum("atom_moe_calls_total")
        assert calls >= 4 * 40 and calls % 4 == 0
    finally:
        assert server.stop() == 0
