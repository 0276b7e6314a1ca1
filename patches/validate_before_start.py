"""verl's own validation asserts language-model settings; a vla3 config is validated by its own schema instead."""

import functools
from pathlib import Path

TARGET = "verl.utils.config"
VERSIONS = ">=0.9,<0.10"
WHY = "there is no hook between composing the config and starting Ray; bad input must be refused before Ray starts"
UPSTREAM = "verl/trainer/main_ppo.py main(); goes when verl has a pre-start hook for plugins"


def apply(module):
    original = module.validate_config

    @functools.wraps(original)
    def validate_config(config, use_reference_policy, use_critic):
        if "vla3" not in config:
            return original(config=config, use_reference_policy=use_reference_policy, use_critic=use_critic)
        from vla3_plugin.launch import before_start, prepare_cluster
        from vla3_plugin.supervise import supervise

        ready = before_start(config)
        supervise(config)
        ready.keep(Path(config.vla3.run_dir))
        prepare_cluster(config)  # in the process that starts it

    module.validate_config = validate_config
