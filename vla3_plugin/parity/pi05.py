"""pi0.5 against golden vectors of lerobot's, from the published tensor names to environment actions.

The directory's format is pi0's; the network has no state token, and its expert is given the time beside the tokens.
"""

from __future__ import annotations

from torch import Tensor

from vla3_plugin.parity import pi0
from vla3_plugin.parity.golden import Golden
from vla3_plugin.policies.pi05 import PI05Policy
from vla3_plugin.policies.pi05_prompt import STATE_PROMPT

NOT_COMPUTED = pi0.NOT_COMPUTED
masks = pi0.masks


def outputs(golden: Golden) -> dict[str, Tensor]:
    policy = pi0.load(golden, PI05Policy, prompt=STATE_PROMPT)
    conditions = {
        f"v.{case}.adarms_cond": policy.network.condition(golden.inputs[f"v.{case}.t"], policy.dtype)
        for case in pi0.cases(golden)
    }
    return {
        **pi0.preprocessing(golden, policy),
        **pi0.network(golden, policy),
        **pi0.sampling(golden, policy),
        **conditions,
    }
