"""transformers' own continuous batching as a process that runs one load a line: the peer of the throughput benchmarks.

Reads JSON lines ``{"prompts": [[id, ...], ...], "output_len": N, ...}`` and answers each with ``{"duration": seconds,
"output_tokens": N}``. A line may name ``threads``, ``max_batch_tokens`` (all prompts in flight by default),
``cuda_graphs`` (transformers' own choice by default) and ``room`` (tokens of output that the cache holds for each request,
``output_len`` by default). The client is in-process: nothing of HTTP is in its figures. The first thing it says is ``ready``,
and the bytes that the weights take.

On a GPU the manager is kept between loads of the same options, so that its set-up and captures are in the first alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from atom.engine.loading import resolve_model_path


def main() -> None:
    """Load the model, say ``ready``, serve lines until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-concurrency", type=int, required=True)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    args = parser.parse_args()
    model = _load(args)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print("ready", size, flush=True)
    server = _Server(model, args)
    for line in sys.stdin:
        print(json.dumps(server.run(**json.loads(line))), flush=True)


def _load(args: argparse.Namespace) -> torch.nn.Module:
    path = resolve_model_path(args.model)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": args.attention}
    if args.device == "cuda":
        options["experts_implementation"] = "grouped_mm"
    if args.load_format == "dummy":
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, device_map=args.device, **options)
    return model.eval()


class _Server:
    def __init__(self, model: torch.nn.Module, args: argparse.Namespace) -> None:
        self._model = model
        self._args = args
        self._options: dict[str, Any] | None = None

    def run(
        self,
        *,
        prompts: list[list[int]],
        output_len: int,
        threads: int | None = None,
        **options: Any,
    ) -> dict[str, float]:
        if threads is not None:
            torch.set_num_threads(threads)
        args, keeps = self._args, self._args.device == "cuda"
        if keeps and options != self._options and self._options is not None:
            self._model.destroy_cached_continuous_batching_manager()
            torch.cuda.empty_cache()
        self._options = options
        longest = max(map(len, prompts))
        pages = -(-(longest + options.get("room", output_len)) // args.page_size)
        # Sized for the load: all requests in flight fit the cache and can prefill in one step.
        batching = ContinuousBatchingConfig(
            page_size=args.page_size,
            num_blocks=pages * args.max_concurrency,
            max_batch_tokens=options.get("max_batch_tokens") or longest * args.max_concurrency,
            max_requests_per_batch=args.max_concurrency,
            allow_block_sharing=False,
            use_cuda_graph=options.get("cuda_graphs"),
        )
        generation = GenerationConfig(do_sample=False, max_new_tokens=output_len, eos_token_id=-1)
        with torch.inference_mode():
            start = time.perf_counter()
            results = self._model.generate_batch(
                prompts,
                generation_config=generation,
                continuous_batching_config=batching,
                progress_bar=False,
                persistent_manager=keeps,
            )
            duration = time.perf_counter() - start
        made = [len(result.generated_tokens) for result in results.values()]
        assert made == [output_len] * len(prompts), f"not every request was completed: {made}"
        return {"duration": duration, "output_tokens": sum(made)}


if __name__ == "__main__":
    main()
