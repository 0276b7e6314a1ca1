"""FSDP2's offload policy pins host memory, which needs an accelerator; the reference policy always offloads."""

TARGET = "verl.workers.engine.fsdp.transformer_impl"
VERSIONS = ">=0.9,<0.10"
WHY = "CPUOffloadPolicy(pin_memory=True) fails without an accelerator, so neither a reference policy nor offload runs"
UPSTREAM = "verl/workers/engine/fsdp/transformer_impl.py _build_fsdp_module"


def apply(module):
    import torch

    original = module.CPUOffloadPolicy

    def policy(pin_memory=True):
        return original(pin_memory=pin_memory and torch.cuda.is_available())

    module.CPUOffloadPolicy = policy
