"""transformers' continuous batching, driven one step at a time by the caller's own loop.

transformers schedules, pages the KV cache, shares prefixes and prepares the tensors; its own loop, threads, queues and
sampling are left out, since ranks must step together (:mod:`atom.engine.lockstep`) and each request samples from its
own seed (:mod:`atom.engine.step_runner`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from atom.engine import attention
from atom.engine.batch_inputs import HostPreparedIOs, fill_block_table
from atom.engine.cuda_graphs import DecodeGraphs
from atom.engine.decode_step import use_decode_step
from atom.engine.paged_cache import pad_latents, sized_for_latents
from atom.engine.protocol import RankStats, SamplingParams, TokenLogprob, TokenOutput
from atom.engine.sampling import RequestSampler
from atom.engine.step_runner import Request, SamplingRunner

PAGE_TOKENS = 32
"""Tokens of one page of the KV cache; prefixes are shared in whole pages."""

_NO_LIMIT = 1e6
"""Share of the memory that transformers may plan with, where it is not to refuse what the caller has sized."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What one rank's batches may hold.

    Attributes:
        max_model_len: longest prompt plus generation, in tokens.
        max_num_seqs: requests in one batch.
        max_num_batched_tokens: query tokens in one batch.
        kv_tokens: tokens that the KV cache holds.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int

    def __post_init__(self) -> None:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} requests cannot each have a token in a batch of "
                f"max_num_batched_tokens={self.max_num_batched_tokens}."
            )
        if self.kv_tokens < self.max_model_len:
            raise ValueError(
                f"the KV cache of {self.kv_tokens} tokens cannot hold one request of max_model_len="
                f"{self.max_model_len}: lower --max-model-len or raise --max-num-seqs."
            )


def _use_paged_attention(model: nn.Module) -> bool:
    """Give the model the attention of its device that reads pages, where it fits; returns whether it was given."""
    if model.device.type == "cuda":
        from atom.engine import attention_triton

        return attention_triton.use_paged_attention(model)
    fits = attention.use_paged_attention(model)
    if fits:
        use_decode_step(model)
    return fits


class _StepManager(ContinuousBatchingManager):
    """Only used to resolve the configuration and build the batch processor; its thread is never started."""

    reads_pages = False

    def switch_to_cb_friendly_attn(
        self, model: nn.Module, auto_switch_to_flash: bool = True
    ) -> None:
        self.reads_pages = _use_paged_attention(model)
        if not self.reads_pages:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash=False)


class ContinuousBatcher:
    """The requests of one rank, batched by transformers, stepped by the caller.

    One step is ``prepare()``, then, when it answers True, ``step()``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        limits: BatchLimits,
        eos_token_ids: list[int],
        *,
        graphs: bool = False,
    ) -> None:
        """Allocate the KV cache.

        Args:
            model: a causal language model, on its device, in eval mode.
            limits: see :class:`BatchLimits`.
            eos_token_ids: tokens that end a request unless it ignores them.
            graphs: run decode steps as CUDA graphs. For a GPU whose layers wait for no other rank; without effect where
                the attention cannot read pages.
        """
        self.model = model
        self.limits = limits
        self.eos_token_ids = list(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._cancelled: list[TokenOutput] = []
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=-(-limits.kv_tokens // PAGE_TOKENS),
            max_batch_tokens=limits.max_num_batched_tokens,
            max_requests_per_batch=limits.max_num_seqs,
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            safety_margin=0.0,
            # On a GPU the caller has sized the cache from what is free; transformers' own estimate adds masks and copies
            # of keys that an attention over pages never makes.
            max_memory_percent=_NO_LIMIT if model.device.type == "cuda" else None,
        )
        # Stop conditions and sampling are each request's own, so the model-wide generation config stays neutral.
        neutral = GenerationConfig(do_sample=False, eos_token_id=-1)
        manager = _StepManager(model, neutral, config)
        if manager.reads_pages:
            # transformers resolves this to 0 where it knows no kernel that reads pages; ours does.
            pages = -(-limits.max_model_len // PAGE_TOKENS) + 1
            manager.continuous_batching_config.max_blocks_per_request = pages
        text_config = model.config.get_text_config()
        with sized_for_latents(text_config):
            self._processor = manager._create_batch_processor()
        base = self._processor.model_runner
        decode_graphs = None
        if manager.reads_pages and model.device.type == "cuda":
            inputs = HostPreparedIOs(self._processor.inputs_and_outputs, base)
            self._processor.inputs_and_outputs = base.inputs_and_outputs = inputs
            if graphs:
                decode_graphs = DecodeGraphs(
                    limits.max_num_seqs, text_config.vocab_size, model.dtype, model.device
                )
        self._graphs = decode_graphs
        self._ahead = False
        self._runner = SamplingRunner(base, self._requests, decode_graphs, self._prepare_ahead)
        self._processor.model_runner = self._runner
        self._cache = self._processor.cache
        if manager.reads_pages:
            self._cache.fill_block_table = partial(fill_block_table, self._cache)
        pad_latents(self._cache, text_config)
        self._scheduler = self._processor.scheduler
        self._share_prefixes_but_for_prompt_logprobs()

    def _share_prefixes_but_for_prompt_logprobs(self) -> None:
        search = self._cache.search_prefix_match

        def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
            # A shared prefix is not run again, so it would have no logits to report.
            if self._requests[request_id].wants_prompt_logprobs:
                return 0
            return search(request_id, prompt_ids)

        self._cache.search_prefix_match = search_prefix_match

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, or prompt and generation together exceed ``max_model_len``.
        """
        total = len(prompt_ids) + params.max_tokens
        if not prompt_ids or params.max_tokens < 1 or total > self.limits.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={params.max_tokens} do not fit: both must be "
                f"at least 1 and together at most max_model_len={self.limits.max_model_len}."
            )
        ends = set(params.stop_token_ids) | (
            set() if params.ignore_eos else set(self.eos_token_ids)
        )
        self._requests[request_id] = Request(RequestSampler(params), prompt_ids)
        self._scheduler.add_waiting_request(
            RequestState(
                request_id=request_id,
                initial_tokens=list(prompt_ids),
                max_new_tokens=params.max_tokens,
                eos_token_id=sorted(ends),
                streaming=True,
            )
        )

    def warm_up(self) -> None:
        """Run small requests, so that kernels are compiled and decode graphs captured before a client waits for them.

        The batcher is empty before and after. Every rank makes the same steps.
        """
        tokens = min(3, self.limits.max_model_len - 1)
        self._run_to_the_end([[0] * min(40, self.limits.max_model_len - tokens)], tokens)
        if self.model.device.type != "cpu":
            # Kernels there have tiles by the size of the batch.
            most = self.limits.max_num_batched_tokens
            for count in (*(size for size in (64, 256, 1024, 4096) if size < most), most):
                self._run_to_the_end(self._prompts_of(count), 1)
            self._cache.reset()
        if self._graphs is not None:
            # The largest first: the others' memory then fits into its own. One-token prompts are decode steps already.
            for size in reversed(self._graphs.sizes):
                self._run_to_the_end([[0]] * size, 1)

    def _prompts_of(self, tokens: int) -> list[list[int]]:
        """As few prompts as hold ``tokens`` tokens, or as many as a batch takes. Their first tokens differ, so that none
        shares another's pages."""
        longest = self.limits.max_model_len - 1
        lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
        vocab = self.model.config.get_text_config().vocab_size
        prompts = [[(tokens + i) % vocab] + [0] * (n - 1) for i, n in enumerate(lengths)]
        return prompts[: self.limits.max_num_seqs]

    def _run_to_the_end(self, prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.add(f"warm-up/{number}", prompt, params)
        with torch.inference_mode():
            while self.has_requests:
                if self.prepare():
                    self.step()

    def cancel(self, request_id: str) -> None:
        """Free a request; one that is gone already is passed over."""
        if self._requests.pop(request_id, None) is not None:
            self._scheduler.set_request_cancellation(request_id)
            self._scheduler.clear_cancelled_requests()
            self._cancelled.append(TokenOutput(request_id=request_id, finish_reason="cancelled"))

    @property
    def captured_graphs(self) -> int:
        """Padded batch sizes whose decode step is a CUDA graph."""
        return 0 if self._graphs is None else self._graphs.captured

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._requests)

    def take_cancelled(self) -> list[TokenOutput]:
        """The closing outputs of requests cancelled since the last call."""
        taken, self._cancelled = self._cancelled, []
        return taken

    def prepare(self) -> bool:
        """Schedule the next batch. Returns whether there is one."""
        if self._ahead:
            self._ahead = False
            if self._take_ahead():
                return True
        return self.has_requests and self._processor.prepare_next_batch()

    def _prepare_ahead(self) -> None:
        """Schedule the next decode batch while the GPU runs this one.

        It lacks the tokens that this one gives, and cannot know which requests they end. Left alone where the cache could
        run full, since then requests would be evicted that are running.
        """
        inputs, scheduler = self._processor.inputs_and_outputs, self._scheduler
        active = scheduler.active_requests.values()
        room = 2 * len(active) * self._cache.bytes_per_sector
        if (
            scheduler.waiting_requests
            or not all(state.status == RequestStatus.DECODING for state in active)
            or not any(state.generated_len() + 1 < state._new_tokens_limit for state in active)
            or self._cache.compute_free_capacity(relative=False) < room
        ):
            return
        inputs.retrieve_device_outputs()
        self._ahead = self._processor.prepare_next_batch()

    def _take_ahead(self) -> bool:
        """Complete the batch that was scheduled ahead, or take it back when a request waits or none of its own is left."""
        inputs = self._processor.inputs_and_outputs
        states = [future.state for future in inputs.requests_in_batch]
        alive = [self._is_active(state) for state in states]
        if self._scheduler.waiting_requests or not any(alive):
            for state, lives in zip(states, alive, strict=True):
                if lives:
                    state.position_offset -= 1
            return False
        # A request that ended keeps its row for this one step, on pages that nobody else gets before the next.
        tokens = [
            state.tokens_to_process[0] if lives else 0
            for state, lives in zip(states, alive, strict=True)
        ]
        inputs.input_ids[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return True

    def _is_active(self, state: RequestState) -> bool:
        return self._scheduler.active_requests.get(state.request_id) is state

    @property
    def batch_tokens(self) -> int:
        """Query tokens of the batch that :meth:`prepare` scheduled last."""
        return self._processor.inputs_and_outputs.num_q_tokens

    def step(self) -> list[TokenOutput]:
        """Run the batch that :meth:`prepare` scheduled and return what it gave each request."""
        scheduled = self._processor.inputs_and_outputs.requests_in_batch
        self._processor._generation_step(self.model)
        tokens = self._runner.tokens
        outputs: list[TokenOutput] = []
        index = 0
        for future in scheduled:
            state = future.state
            if not self._is_active(state):
                index += future.has_new_token
                continue
            if not future.has_new_token:
                self._cache.mark_complete_blocks(state, future.complete_blocks)
                continue
            token, logprob = tokens[index], self._runner.logprobs[index]
            index += 1
            state.status = RequestStatus.DECODING
            finished = state.update_and_check_completion(token, None)
            self._cache.mark_complete_blocks(state, future.complete_blocks)
            outputs.append(self._output(state, token, logprob, finished))
            if finished:
                self._scheduler.finish_request(state.request_id)
                self._scheduler.block_new_requests = False
                del self._requests[state.request_id]
        return outputs

    def _output(
        self, state: RequestState, token: int, logprob: TokenLogprob | None, finished: bool
    ) -> TokenOutput:
        request = self._requests[state.request_id]
        output = TokenOutput(request_id=state.request_id, token_ids=[token])
        if logprob is not None:
            output.logprobs = [logprob]
        if request.sampler.params.prompt_logprobs and request.prompt_logprobs:
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
            # Reported once: with the parameter gone, a request that is evicted and run again does not gather anew.
            request.sampler.params = msgspec.structs.replace(
                request.sampler.params, prompt_logprobs=False
            )
        if finished:
            output.finish_reason = "stop" if token in state._eos_token_ids else "length"
        return output

    def stats(self) -> RankStats:
        """Requests and KV cache in use; the caller adds steps and wire bytes."""
        running = len(self._scheduler.active_requests)
        return RankStats(
            running=running,
            waiting=len(self._requests) - running,
            kv_used=1.0 - float(self._cache.compute_free_capacity()),
        )
