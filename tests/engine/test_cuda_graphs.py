"""The sizes that decode batches are padded to. What the graphs compute is tested on a GPU: tests/gpu/test_server_gpu.py."""

import pytest

from atom.engine.cuda_graphs import batch_sizes


@pytest.mark.parametrize("most", [1, 3, 16, 64, 100, 256, 257, 1000])
def test_every_batch_has_a_size_and_little_padding(most):
    sizes = batch_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        # At most the next power of two below 16, a half more up to 128 and a quarter more above.
        assert size <= max(2 * rows - 1, 16) and (rows <= 16 or size <= 1.5 * rows)
