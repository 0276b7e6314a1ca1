"""The learner's checkpoint under megatron: verl's file names, contents and generators, read without pickled code.

``model_…_rank_0.pt`` is the whole module, which every rank holds alike; each rank adds ``optim_…`` (its part of Adam's
state, and of the float32 parameters where the module's are bfloat16) and ``extra_state_…`` (schedule, generators).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id


class MegatronCheckpoint(BaseCheckpointManager):
    """``model``: the module inside the data-parallel wrapper; ``optimizer``: megatron's chained one."""

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        directory = Path(local_path)
        directory.mkdir(parents=True, exist_ok=True)
        if self.should_save_model and self.rank == 0:
            torch.save(self.model.state_dict(), self._file(directory, "model", 0))
        if self.should_save_optimizer:
            torch.save([_state(part) for part in _parts(self.optimizer)], self._file(directory, "optim"))
        if self.should_save_extra:
            extra = {"lr_scheduler": self.lr_scheduler.state_dict(), "rng": _plain(self.get_rng_state())}
            torch.save(extra, self._file(directory, "extra_state"))
        torch.distributed.barrier()

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        """What this rank, among as many, has saved.

        Raises:
            ValueError: a file holds more than tensors and plain values, or the optimizer's part is another one.
        """
        directory = Path(local_path)
        if self.should_load_model:
            self.model.load_state_dict(_read(self._file(directory, "model", 0)))
            for part in _parts(self.optimizer):
                part.reload_model_params()  # where the file of the optimizer is not wanted
        if self.should_load_optimizer:
            file = self._file(directory, "optim")
            for part, state in zip(_parts(self.optimizer), _read(file), strict=True):
                _restore(part, state, file)
        if self.should_load_extra:
            extra = _read(self._file(directory, "extra_state"))
            self.load_rng_state(_as_numpy(extra["rng"]))
            # the place in the schedule alone, as under FSDP: megatron would bring back the old horizon as well, and a
            # run that is given more steps would go on at the least rate
            self.lr_scheduler.num_steps = extra["lr_scheduler"]["num_steps"]
            self.lr_scheduler.step(0)
        torch.distributed.barrier()

    def _file(self, directory: Path, kind: str, rank: int | None = None) -> Path:
        return directory / f"{kind}_world_size_{self.world_size}_rank_{self.rank if rank is None else rank}.pt"


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers inside megatron's chain that own parameters of this rank."""
    return [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]


def _shards(part: Any) -> list[torch.Tensor]:
    """What Adam updates: float32, this rank's shards with the distributed optimizer."""
    return [parameter for group in part.optimizer.param_groups for parameter in group["params"]]


def _state(part: Any) -> dict[str, Any]:
    return {"adam": part.optimizer.state_dict(), "main_parameters": [p.detach().cpu() for p in _shards(part)]}


def _restore(part: Any, state: dict[str, Any], file: Path) -> None:
    shards, saved = _shards(part), state["main_parameters"]
    if [p.shape for p in shards] != [p.shape for p in saved]:
        raise ValueError(f"{file}: {len(saved)} parts of parameters of other sizes than this rank's {len(shards)}")
    part.optimizer.load_state_dict(state["adam"])
    with torch.no_grad():
        for parameter, value in zip(shards, saved, strict=True):
            parameter.copy_(value)


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location=torch.device(get_device_id()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"the checkpoint {file} holds more than tensors and plain values and is not opened, since it could run "
            "code; use another one"
        ) from error


def _plain(generators: dict[str, Any]) -> dict[str, Any]:
    """numpy's state is an array, which torch's restricted reader does not know."""
    name, keys, *rest = generators["numpy"]
    return generators | {"numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}


def _as_numpy(generators: dict[str, Any]) -> dict[str, Any]:
    name, keys, *rest = generators["numpy"]
    moved = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in generators.items()}
    return moved | {"numpy": (name, keys.cpu().numpy().astype(np.uint32), *rest)}
