"""mori's dispatch plan from ROCm/mori#593 on: a scale row may travel with each token."""

from tests.gfx1250.doubles.core import check_plan


class EpDispatchPlan:
    def __init__(
        self,
        *,
        world_size,
        hidden_dim,
        max_tok_per_rank,
        num_expert_per_rank,
        num_expert_per_token,
        max_recv,
        dtype,
        use_weights,
        scale_bytes=0,
    ):
        check_plan(
            world_size,
            hidden_dim,
            max_tok_per_rank,
            num_expert_per_token,
            max_recv,
            dtype,
            scale_bytes,
        )
