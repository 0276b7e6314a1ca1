"""verl opens the files of a checkpoint as pickles, which can run code; torch's restricted reader is enough for them."""

import contextlib
import functools
import os
import pickle
import re

TARGET = "verl.utils.checkpoint.fsdp_checkpoint_manager"
VERSIONS = ">=0.9,<0.10"
WHY = "torch.load(weights_only=False) runs what a file says; model, optimizer and generator states need no code"
UPSTREAM = "verl/utils/checkpoint/fsdp_checkpoint_manager.py load_checkpoint; goes when it passes weights_only=True"
_SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def restricted():
    """torch.load in this block rebuilds tensors, containers and numpy's generator state, and nothing else."""
    import numpy as np
    import torch

    multiarray = (np._core if hasattr(np, "_core") else np.core).multiarray
    harmless = [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        with torch.serialization.safe_globals(harmless):
            yield
    finally:
        os.environ.pop(_SWITCH)
        if before is not None:
            os.environ[_SWITCH] = before


def apply(module):
    original = module.FSDPCheckpointManager.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self, local_path, *args, **kwargs):
        try:
            with restricted():
                return original(self, local_path, *args, **kwargs)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise ValueError(
                f"the checkpoint {local_path} holds more than tensors and plain values"
                f"{f' ({named[1]})' if named else ''} and is not opened, since it could run code; use another one"
            ) from None

    module.FSDPCheckpointManager.load_checkpoint = load_checkpoint
