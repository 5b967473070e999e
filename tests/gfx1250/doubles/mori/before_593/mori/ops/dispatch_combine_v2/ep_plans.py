"""mori's dispatch plan before ROCm/mori#593: an unknown keyword, such as scale_bytes, is refused."""

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
    ):
        check_plan(
            world_size, hidden_dim, max_tok_per_rank, num_expert_per_token, max_recv, dtype, 0
        )
