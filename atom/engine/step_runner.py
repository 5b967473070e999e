"""One step of transformers' batches: the model, then a token for each request from its own parameters and seed.

Shape suffixes: Q query tokens of the batch, N requests with a new token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState

from atom.engine.cuda_graphs import DecodeGraphs
from atom.engine.protocol import SamplingParams, TokenLogprob
from atom.engine.sampling import RequestSampler, choose, token_logprobs


@dataclass
class Request:
    """What is kept of a request beside transformers' own state."""

    sampler: RequestSampler
    prompt_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be gathered."""
        return self.sampler.params.prompt_logprobs and len(self.prompt_logprobs) < len(
            self.prompt_ids
        )


GONE = Request(RequestSampler(SamplingParams(max_tokens=1, temperature=0)), [])
"""Stands for a request that ended after its next step was scheduled."""


class SamplingRunner(ModelRunner):
    """Runs the model and samples each request from its own parameters.

    Attributes:
        tokens: chosen by the last step, one for each request that got one. logprobs: likewise, None where not wanted.
    """

    def __init__(
        self,
        base: ModelRunner,
        requests: dict[str, Request],
        graphs: DecodeGraphs | None,
        while_running: Callable[[], None],
    ) -> None:
        """
        Args:
            base: whose parts this one takes over.
            requests: the batcher's, by id.
            graphs: run decode batches; None runs them eagerly.
            while_running: called when a decode batch was launched and its result is not waited for yet.
        """
        super().__init__(
            logit_processor=base.logit_processor,
            cb_config=base.cb_config,
            inputs_and_outputs=base.inputs_and_outputs,
            cache=base.cache,
            do_sample=False,
            return_logprobs=False,
        )
        self._requests = requests
        self._graphs = graphs
        self.while_running = while_running
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []

    def maybe_pad_inputs(
        self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool
    ) -> tuple[int, int]:
        """Decode batches are padded to a size that is, or will be, captured."""
        self.pad_inputs = self._graphs is not None and use_decode_fast_path
        if self.pad_inputs:
            return self._graphs.padded(num_q_tokens), 0
        return num_q_tokens, max_kv_read

    def supports_logits_to_keep(self, model: nn.Module) -> bool:
        """Prompt log probabilities need the logits of every query token."""
        requests = (self._requests.get(s.state.request_id, GONE) for s in self._batch)
        if any(request.wants_prompt_logprobs for request in requests):
            return False
        return super().supports_logits_to_keep(model)

    @property
    def _batch(self) -> list[FutureRequestState]:
        return self.inputs_and_outputs.requests_in_batch

    def _forward_process_and_sample(
        self,
        model: nn.Module,
        batch_data: dict,
        carry_over_ids: torch.Tensor,
        prev_output_ids: torch.Tensor,
        output_ids: torch.Tensor,
    ) -> None:
        samplers = [
            self._requests.get(s.state.request_id, GONE).sampler
            for s in self._batch
            if s.has_new_token
        ]
        count = len(samplers)
        likeliest = None
        if self.pad_inputs and "logits_to_keep" in batch_data:
            logits, tokens_N = self._graphs.run(model, batch_data)
            self.while_running()
            likeliest = tokens_N[:count].tolist()
        else:
            logits = model(**batch_data).logits[0]
        if logits.device.type == "cpu":
            logits = logits.float()
        if "logits_to_keep" in batch_data:
            logits_NV = logits[:count]
        else:
            self._gather_prompt_logprobs(logits)
            logits_NV = logits[batch_data["logits_indices"][:count]]
        self.tokens = choose(logits_NV, samplers, likeliest)
        wanted = [s.params.logprobs for s in samplers]
        self.logprobs = token_logprobs(logits_NV, self.tokens, wanted)

    def _gather_prompt_logprobs(self, logits_QV: torch.Tensor) -> None:
        start = 0
        for scheduled in self._batch:
            length = scheduled.query_length
            request = self._requests[scheduled.state.request_id]
            if request.wants_prompt_logprobs:
                if not request.prompt_logprobs:
                    request.prompt_logprobs.append(None)
                # Row i of the logits predicts the prompt token after it; the last row predicts a new token.
                position = len(request.prompt_logprobs)
                targets = request.prompt_ids[position : position + length]
                rows = logits_QV[start : start + len(targets)]
                counts: list[int | None] = [request.sampler.params.logprobs or 0] * len(targets)
                request.prompt_logprobs += token_logprobs(rows, targets, counts)
            start += length
