"""transformers' own continuous batching as a process that runs one load a line: the peer of ``bench_throughput``.

Reads JSON lines ``{"prompts": [[id, ...], ...], "output_len": N, "threads": N}`` and answers each with
``{"duration": seconds, "output_tokens": N}``. The client is in-process: nothing of HTTP is in its figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from atom.engine.loading import resolve_model_path


def main() -> None:
    """Load the model, say ``ready``, serve lines until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-concurrency", type=int, required=True)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--attention", default="sdpa")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model_path(args.model), dtype=torch.bfloat16, attn_implementation=args.attention
    ).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(model, args, **json.loads(line))), flush=True)


def _run(
    model: torch.nn.Module,
    args: argparse.Namespace,
    *,
    prompts: list[list[int]],
    output_len: int,
    threads: int,
) -> dict[str, float]:
    torch.set_num_threads(threads)
    longest = max(map(len, prompts))
    pages = -(-(longest + output_len) // args.page_size)
    # Sized for the load: all requests in flight fit the cache and can prefill in one step.
    batching = ContinuousBatchingConfig(
        page_size=args.page_size,
        num_blocks=pages * args.max_concurrency,
        max_batch_tokens=longest * args.max_concurrency,
        max_requests_per_batch=args.max_concurrency,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=output_len, eos_token_id=-1)
    with torch.inference_mode():
        start = time.perf_counter()
        results = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        duration = time.perf_counter() - start
    made = [len(result.generated_tokens) for result in results.values()]
    assert made == [output_len] * len(prompts), f"not every request was completed: {made}"
    return {"duration": duration, "output_tokens": sum(made)}


if __name__ == "__main__":
    main()
