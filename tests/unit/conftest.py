from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def single_process_group(tmp_path):
    """One rank over gloo; the store is a file, so that no port is taken."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()
