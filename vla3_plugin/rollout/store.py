"""Trajectories in and out of verl's TransferQueue: one row a chunk step, keyed ``{episode}_{chunk}``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

from vla3_plugin.contract import Trajectory
from vla3_plugin.learner.fields import MASKS, SCALAR, densify
from vla3_plugin.rollout import store_nodes as _store_nodes  # noqa: F401  where rows lie; not all processes import verl
from vla3_plugin.telemetry import traffic

PARTITION = "train"


def connect() -> None:
    """Find the queue, from a process that verl did not start."""
    tq.init()


def put_trajectory(trajectory: Trajectory) -> None:
    samples = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in trajectory.samples.items()}
    episode = trajectory.episode
    count = len(trajectory)
    samples["episode_id"] = torch.full((count, 1), episode.episode_id)
    samples["group_id"] = torch.full((count, 1), episode.group_id)
    samples["chunk_index"] = torch.arange(count)[:, None]
    traffic.count("env_to_store", samples)
    tags = [{"status": "success", "version": int(v)} for v in trajectory.samples["version"].reshape(count)]
    # the queue unbinds a batch into rows of at least one dimension
    fields = {name if t.dim() > 1 else name + SCALAR: t if t.dim() > 1 else t[:, None] for name, t in samples.items()}
    tq.kv_batch_put(
        keys=trajectory.keys(), partition_id=PARTITION, fields=TensorDict(fields, batch_size=count), tags=tags
    )


def get_fields(keys: Sequence[str], names: Sequence[str]) -> dict[str, Tensor]:
    data = densify(tq.kv_batch_get(keys=list(keys), partition_id=PARTITION, select_fields=list(names)))
    traffic.count("store_to_driver", dict(data.items()))
    return {name: data[name] for name in names}


def get_rows(keys: Sequence[str]) -> dict[str, Tensor]:
    """All fields of ``keys``, images included, for a checkpoint."""
    data = dict(densify(tq.kv_batch_get(keys=list(keys), partition_id=PARTITION)).items())
    traffic.count("store_to_checkpoint", data)
    return data


def copy_samples(source: Sequence[str], copies: Sequence[str]) -> None:
    """Store ``source``, of which some may be named more than once, once more under the names ``copies``.

    The copies have every field, and weigh nothing.
    """
    unique = list(dict.fromkeys(source))
    data = densify(tq.kv_batch_get(keys=unique, partition_id=PARTITION))
    rows = [unique.index(key) for key in source]
    fields = {name: torch.zeros_like(data[name]) if name in MASKS else data[name] for name in data.keys()}
    fields = {name: value[rows] for name, value in fields.items()}
    traffic.count("store_to_learner", dict(data.items()))
    traffic.count("learner_to_store", fields)
    tq.kv_batch_put(keys=list(copies), partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(copies)))


def clear(keys: Sequence[str]) -> None:
    if keys:
        tq.kv_clear(keys=list(keys), partition_id=PARTITION)


def clear_episodes(episodes: Sequence[int]) -> None:
    """Forget every sample of these episodes, however many there are."""
    gone = {str(index) for index in episodes}
    if gone:
        known = tq.kv_list(partition_id=PARTITION).get(PARTITION, {})
        clear([key for key in known if key.partition("_")[0] in gone])


def put_fields(keys: Sequence[str], fields: dict[str, Tensor]) -> None:
    traffic.count("driver_to_store", fields)
    tq.kv_batch_put(keys=list(keys), partition_id=PARTITION, fields=TensorDict(dict(fields), batch_size=len(keys)))


def batch_of(keys: Sequence[str], **extra_info: Any) -> tq.KVBatchMeta:
    """What verl's worker groups take in the place of data; the workers fetch the rows themselves."""
    batch = tq.KVBatchMeta(partition_id=PARTITION, keys=list(keys), tags=[{} for _ in keys])
    batch.extra_info.update(extra_info)
    return batch
