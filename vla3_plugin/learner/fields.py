"""Names of the fields of one training sample (one chunk step) in the store, and how a batch is split by them.

``in.*`` are the policy's prepared inputs and ``trace.*`` what makes the log-prob recomputable; together they are what
``VLAPolicy.forward`` gets. The rest belongs to the learner.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

INPUT, TRACE = "in.", "trace."
SCALAR = ".scalar"  # marks a field that is [N] for the policy and [N, 1] in the store

LOGPROB = "logprob"  # [N, C, D] behaviour policy, finest level
VALUE = "value"  # [N, 1] or [N, C] behaviour policy
ADVANTAGES = "advantages"  # [N, L], L: elements of the policy loss after granularity
RETURNS = "returns"  # like VALUE
POLICY_MASK = "loss_mask"  # [N, L] bool as float; verl's engines expect this name
VALUE_MASK = "value_mask"  # like VALUE
MASKS = (POLICY_MASK, VALUE_MASK)  # a sample that weighs nothing has them zero
STEP_MASK = "valid"  # [N, C]
VERSION = "version" + SCALAR  # [N, 1] what made the sample
BOOTSTRAP = "bootstrap"  # like VALUE: of the final observation, at the chunk step that was truncated
BOOTSTRAP_VERSION = "bootstrap_version" + SCALAR  # [N, 1] what gave it
REF_LOGPROB = "ref_logprob"  # [N, C, D]
PROXIMAL = "proximal_logprob"  # [N, C, D] the learner's, before the updates of the step
LEARNER_LOGPROB = "learner_logprob"  # [N, C, D] forward-only output of the learner
LEARNER_ENTROPY = "learner_entropy"
LEARNER_VALUE = "learner_value"


def densify(data: TensorDict) -> TensorDict:
    """Stack what TransferQueue hands back as jagged nested tensors although all rows have one shape."""
    for key, value in list(data.items()):
        if isinstance(value, Tensor) and value.is_nested:
            data[key] = torch.stack(list(value.unbind()))
    return data


def policy_batch(data: TensorDict) -> dict[str, Tensor]:
    """What ``VLAPolicy.forward`` gets of a batch: inputs under their own names, traces under ``trace.*``."""
    batch = {}
    for key, value in data.items():
        if key.endswith(SCALAR):
            key, value = key.removesuffix(SCALAR), value.squeeze(-1)
        if key.startswith(INPUT):
            batch[key[len(INPUT) :]] = value
        elif key.startswith(TRACE):
            batch[key] = value
    return batch
