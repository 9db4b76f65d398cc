#!/usr/bin/env bash
# The part that needs a GPU: builds against the torch that is there and runs tests/gpu. Under 4 minutes in all.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
# --no-deps: the machine may reach no package index; what is missing is named by the import below.
"$python" -m pip install -q --no-build-isolation --no-deps -e .
"$python" -c 'import click, msgspec, pytest, rich'
TENSORPLAY_REQUIRE=cuda timeout 180 "$python" -m pytest -q -p no:cacheprovider tests/gpu
