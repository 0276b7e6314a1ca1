"""The environment checker accepts what keeps its promises and names what does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy_env

from vla3_plugin.envs.check import EnvCheckError, check_env, check_spec


@pytest.mark.parametrize("options", [{}, {"num_slots": 3}, {"init_states": 5}, {"max_steps": 20}, {"max_steps": 3}])
def test_the_toy_passes(options):
    remarks = check_env(toy_env.ToyEnv(**options))
    assert [r for r in remarks if "one slot" not in r and "no expert" not in r] == []


def test_an_expert_shows_termination_inside_a_chunk():
    assert check_env(toy_env.ToyExpert(num_slots=2)) == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (toy_env.UnseededEnv(), "started again, differs"),
        (toy_env.DeafEnv(), "lead to the same observation"),
        (toy_env.EndlessEnv(), "after the episode ended was accepted"),
        (toy_env.BlindEnv(), "is black"),
        (toy_env.OverrunEnv(), "max_steps"),
        (toy_env.FaultyEnv(fault="nan state"), "state is not finite"),
        (toy_env.FaultyEnv(fault="image shape"), r"images\[top\] has shape"),
        (toy_env.FaultyEnv(fault="image type"), r"images\[top\] has dtype float32"),
    ],
    ids=lambda value: type(value).__name__ + getattr(value, "_fault", "") if not isinstance(value, str) else "",
)
def test_a_broken_promise_is_named(broken, message):
    with pytest.raises(EnvCheckError, match=message):
        check_env(broken)


def test_results_in_the_wrong_order_are_found():
    class Shuffled(toy_env.ToyEnv):
        def chunk_step(self, slots, actions, record=False):
            results = super().chunk_step(slots, actions, record)
            return sorted(results, key=lambda r: float(r.observation.state[0]))

    with pytest.raises(EnvCheckError, match="order"):
        check_env(Shuffled(num_slots=2))


def test_an_instruction_of_another_task_is_found():
    class Confused(toy_env.ToyEnv):
        def _observe(self, slot):
            observation = super()._observe(slot)
            observation.instruction = self.spec.instructions[0]
            return observation

    with pytest.raises(EnvCheckError, match="task 1 says"):
        check_env(Confused())


def test_actions_are_not_written_to():
    class Scribbler(toy_env.ToyEnv):
        def chunk_step(self, slots, actions, record=False):
            results = super().chunk_step(slots, actions, record)
            actions[...] = 0
            return results

    with pytest.raises(EnvCheckError, match="changed the actions"):
        check_env(Scribbler())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_names": ["x", "x"]}, "more than once"),
        ({"action_low": [-1.0, -1.0]}, "action_low"),
        ({"action_high": [1.0, np.inf, 1.0]}, "action_high"),
        ({"action_low": [1.0, -1.0, -1.0]}, r"not below .*\['dx'\]"),
        ({"max_steps": 0}, "max_steps"),
        ({"instructions": ["one"]}, "instructions"),
        ({"control_hz": np.float32(10)}, "JSON"),
        ({"success": ""}, "success"),
    ],
)
def test_a_bad_declaration_is_named(change, message):
    with pytest.raises(EnvCheckError, match=message):
        check_spec(replace(toy_env.ToyEnv().spec, **change))


def test_something_that_is_no_environment_is_refused():
    with pytest.raises(EnvCheckError, match="ChunkEnv"):
        check_env(object())  # type: ignore[arg-type]
