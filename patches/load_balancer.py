"""verl starts a load balancer with every server manager, and V1 trainers have two of those; here nobody asks them."""

import functools

TARGET = "verl.workers.rollout.llm_server"
VERSIONS = ">=0.9,<0.10"
WHY = "two processes that nobody asks are started with every run: nine CPU seconds of imports and a gigabyte of memory"
UPSTREAM = "verl/workers/rollout/llm_server.py _init_global_load_balancer; goes when verl starts it on demand"


def apply(module):
    original = module.LLMServerManager._init_global_load_balancer

    @functools.wraps(original)
    async def unless_ours(self):
        if self.rollout_config.name == "vla3":  # an env worker knows its policy worker
            self.global_load_balancer = None
        else:
            await original(self)

    module.LLMServerManager._init_global_load_balancer = unless_ours
