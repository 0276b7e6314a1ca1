"""A checker that authors of environments run on theirs: ``check_env(MyEnv(num_slots=2))``.

It drives the environment as the plugin will, and raises ``EnvCheckError`` with what is wrong and how it was seen. What
it could not see (an environment without an expert never reached success, say) comes back as a list of remarks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Callable, Optional

import numpy as np

from vla3_plugin.contract import ChunkResult, ContractError, EnvSpec, Episode, Observation
from vla3_plugin.envs.base import ChunkEnv

STATE_TOLERANCE = 1e-4  # simulators need not be exact to the last bit from one reset to the next
PIXEL_TOLERANCE = 1.0  # mean difference in grey levels


class EnvCheckError(AssertionError):
    """The environment breaks a promise of ``ChunkEnv``."""


def check_env(env: ChunkEnv, chunk: int = 5, seed: int = 0) -> list[str]:
    """Check ``env``, in this process or behind ``EnvProcess``; about ten episodes of at most ``max_steps``.

    ``chunk``: length of the chunks to try. The environment is left usable; closing it is the caller's.

    Raises:
        EnvCheckError: at the first broken promise.
    """
    _require(isinstance(env, ChunkEnv), f"{type(env).__name__} lacks something of ChunkEnv: see envs.base")
    check_spec(env.spec)
    _require(env.num_slots >= 1, f"num_slots is {env.num_slots}, expected at least 1")
    checker = _Checker(env, max(2, chunk), seed)
    for part in (
        checker.resets,
        checker.images,
        checker.slots_agree,
        checker.steps,
        checker.actions_matter,
        checker.truncation,
        checker.refusals,
        checker.termination,
    ):
        try:
            part()
        except ContractError as error:
            raise EnvCheckError(str(error)) from error
    return checker.remarks


def check_spec(spec: EnvSpec) -> None:
    """What can be wrong with a declaration on its own."""
    _require(bool(spec.name), "spec.name is empty")
    _require(bool(spec.success), "spec.success is empty: say what counts as success")
    for what, names in (("state_names", spec.state_names), ("action_names", spec.action_names)):
        double = sorted({n for n in names if names.count(n) > 1})
        _require(not double, f"spec.{what} holds {double} more than once")
    _require(spec.action_dim >= 1, "spec.action_names is empty")
    for what, bound in (("action_low", spec.action_low), ("action_high", spec.action_high)):
        fits = len(bound) == spec.action_dim and bool(np.isfinite(bound).all())
        _require(fits, f"spec.{what} is {bound}, expected {spec.action_dim} finite numbers")
    wrong = [n for n, low, high in zip(spec.action_names, spec.action_low, spec.action_high) if not low < high]
    _require(not wrong, f"spec.action_low is not below spec.action_high for {wrong}")
    for what in ("max_steps", "num_tasks"):
        _require(getattr(spec, what) >= 1, f"spec.{what} is {getattr(spec, what)}, expected at least 1")
    _require(spec.control_hz > 0, f"spec.control_hz is {spec.control_hz}, expected more than 0")
    _require(spec.num_init_states >= 0, f"spec.num_init_states is {spec.num_init_states}, expected at least 0")
    _require(
        len(spec.instructions) == spec.num_tasks and all(spec.instructions),
        f"spec.instructions are {spec.instructions}, expected a sentence for each of {spec.num_tasks} tasks",
    )
    try:
        same = EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    except TypeError as error:
        raise EnvCheckError(
            f"spec does not survive JSON ({error}); use Python's own numbers, strings and lists"
        ) from None
    _require(same, "spec does not survive JSON unchanged; use Python's own numbers, strings and lists")


class _Checker:
    def __init__(self, env: ChunkEnv, chunk: int, seed: int) -> None:
        self.env, self.spec, self.chunk = env, env.spec, chunk
        self.remarks: list[str] = []
        self.random = np.random.default_rng(seed)
        self.episode = Episode(episode_id=0, task_id=0, init_state_id=0, seed=seed + 1, group_id=0)
        self.low = np.asarray(self.spec.action_low, np.float32)
        self.high = np.asarray(self.spec.action_high, np.float32)

    # -- the promises --------------------------------------------------------------------------------------------------

    def resets(self) -> None:
        first = self._reset(0, self.episode)
        _require(
            first.instruction == self.spec.instructions[0],
            f"reset: the instruction is {first.instruction!r}, spec.instructions[0] is {self.spec.instructions[0]!r}",
        )
        self._run(0, self._random_chunk())  # leaves traces of an episode behind
        again = self._reset(0, self.episode)
        _require(
            _same(first, again),
            f"reset: the same episode, started again, differs: {_difference(first, again)}; the task, the initial "
            "state and the seed must decide everything",
        )
        other = [replace(self.episode, seed=self.episode.seed + 1 + i) for i in range(3)]
        if self.spec.num_init_states > 1:
            other = [replace(self.episode, init_state_id=i) for i in range(1, min(4, self.spec.num_init_states))]
        differs = any(not _same(first, self._reset(0, episode)) for episode in other)
        _require(differs, "reset: other episodes look exactly like the first; are the seed and init_state_id used?")
        for task in range(1, self.spec.num_tasks):
            seen = self._reset(0, replace(self.episode, task_id=task)).instruction
            expected = self.spec.instructions[task]
            _require(seen == expected, f"reset: task {task} says {seen!r}, spec.instructions has {expected!r}")

    def images(self) -> None:
        observation = self._reset(0, self.episode)
        for camera, image in observation.images.items():
            _require(int(image.max()) > 0, f"images[{camera}] is black after reset")
            _require(
                int(image.max()) > int(image.min()),
                f"images[{camera}] is of one colour ({image[0, 0].tolist()}) after reset",
            )
        seen = list(observation.images.items())
        for i, (camera, image) in enumerate(seen):
            for other, twin in seen[i + 1 :]:
                _require(not np.array_equal(image, twin), f"images[{camera}] and images[{other}] are the same picture")
        if not seen:
            self.remarks.append("there are no cameras: images were not checked")

    def slots_agree(self) -> None:
        if self.env.num_slots == 1:
            self.remarks.append("there is one slot: independence of slots was not checked")
            return
        slots = list(range(self.env.num_slots))
        starts = [self._reset(slot, self.episode) for slot in slots]
        for slot in slots[1:]:
            _require(_same(starts[0], starts[slot]), f"reset: slots 0 and {slot} show the same episode differently")
        script = self._random_chunk()
        others = [self._random_chunk() for _ in slots[1:]]
        alone = self._results(slots, np.stack([script, *others]))[0]
        for slot in slots:
            self._reset(slot, self.episode)
        turned = list(reversed(slots))
        reordered = self._results(turned, np.stack([*reversed(others), script]))[-1]
        _require(
            _same(alone.observation, reordered.observation),
            "chunk_step: slot 0 ended up elsewhere when slots were listed in another order: results must follow the "
            f"order of `slots` ({_difference(alone.observation, reordered.observation)})",
        )

    def steps(self) -> None:
        script = self._random_chunk()
        ends = []
        for _ in range(2):
            self._reset(0, self.episode)
            ends.append(self._run(0, script))
        if not _same(ends[0].observation, ends[1].observation):
            self.remarks.append(
                "the same actions from the same reset lead to different observations "
                f"({_difference(ends[0].observation, ends[1].observation)}): runs will not repeat exactly"
            )
        self._reset(0, self.episode)
        plain = self._run(0, script)
        _require(plain.frames is None, "chunk_step: frames came without being asked for")
        self._reset(0, self.episode)
        filmed = self._run(0, script, record=True)
        count = int(filmed.valid.sum())
        if self.spec.cameras:
            _require(filmed.frames is not None, "chunk_step: no frames although record=True")
            assert filmed.frames is not None
            camera, size = next(iter(self.spec.cameras.items()))
            shape = (count, *size, 3)
            _require(
                filmed.frames.shape == shape and filmed.frames.dtype == np.uint8,
                f"chunk_step: frames are {filmed.frames.dtype} {list(filmed.frames.shape)}, expected uint8 "
                f"{list(shape)}: one image of {camera} for each valid step",
            )

    def actions_matter(self) -> None:
        reached = []
        for action in (self.low, self.high):
            self._reset(0, self.episode)
            reached.append(self._run(0, np.repeat(action[None], self.chunk, axis=0)).observation)
        _require(
            not _same(*reached),
            f"chunk_step: {self.chunk} steps of action_low and of action_high lead to the same observation",
        )

    def truncation(self) -> None:
        chunk = next(
            c for c in range(self.chunk, 2 * self.chunk + 2) if self.spec.max_steps % c or self.spec.max_steps < c
        )
        idle = np.repeat(((self.low + self.high) / 2)[None], chunk, axis=0).astype(np.float32)
        self._reset(0, self.episode)
        steps = 0
        while True:
            result = self._run(0, idle)
            steps += int(result.valid.sum())
            _require(
                steps <= self.spec.max_steps,
                f"{steps} control steps in an episode, spec.max_steps is {self.spec.max_steps}",
            )
            if result.done:
                break
            _require(
                steps < self.spec.max_steps, f"the episode goes on after spec.max_steps = {self.spec.max_steps} steps"
            )
        if result.terminated.any():
            self.remarks.append("the episode ended by itself while nothing was done: truncation was not seen")
        else:
            _require(
                steps == self.spec.max_steps, f"truncated after {steps} steps, spec.max_steps is {self.spec.max_steps}"
            )
            _require(not result.valid.all(), "the chunk that holds the last step has no invalid steps after it")
        self._refuses("a chunk step after the episode ended", lambda: self.env.chunk_step([0], idle[None]))
        self._reset(0, self.episode)  # and a reset makes it usable again
        self._run(0, idle)

    def refusals(self) -> None:
        good = self._random_chunk()[None]
        self._reset(0, self.episode)
        bad = good.copy()
        bad[0, 0, 0] = np.nan
        self._refuses("an action that is not a number", lambda: self.env.chunk_step([0], bad))
        self._refuses("actions of another dimension", lambda: self.env.chunk_step([0], good[:, :, :-1]))
        self._refuses("more action chunks than slots", lambda: self.env.chunk_step([0], np.repeat(good, 2, axis=0)))
        unknown = self.env.num_slots
        self._refuses(f"slot {unknown}", lambda: self.env.reset(unknown, self.episode))
        task = replace(self.episode, task_id=self.spec.num_tasks)
        self._refuses(f"task {task.task_id} of {self.spec.num_tasks}", lambda: self.env.reset(0, task))
        if self.spec.num_init_states:
            state = replace(self.episode, init_state_id=self.spec.num_init_states)
            self._refuses(f"initial state {state.init_state_id}", lambda: self.env.reset(0, state))
        self._reset(0, self.episode)
        self._run(0, good[0])

    def termination(self) -> None:
        expert: Optional[Callable[..., Any]] = getattr(self.env, "expert_chunk", None)
        result = None if expert is None else self._solve(expert)
        if result is None:
            self.remarks.append("no expert reached success: termination inside a chunk was not seen")
            return
        _require(result.success, "an episode terminated, and success is false")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _solve(self, expert: Callable[..., Any]) -> Optional[ChunkResult]:
        """The last chunk of an episode that its expert terminates, if there is an expert and it does."""
        for length in (self.chunk, self.chunk + 1, self.chunk + 2):
            self._reset(0, self.episode)
            while True:
                try:
                    result = expert([0], length)[0].result
                except Exception as error:
                    if "expert_chunk" in str(error):  # the handle has the method, the environment behind it has not
                        return None
                    raise
                result.check(self.spec, f"expert_chunk of {self.spec.name}")
                if result.done:
                    break
            if result.terminated.any() and not result.valid.all():
                return result
        return None

    def _reset(self, slot: int, episode: Episode) -> Observation:
        observation = self.env.reset(slot, episode)
        observation.check(self.spec, f"reset of {self.spec.name}")
        return observation

    def _results(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        before = actions.copy()
        results = self.env.chunk_step(slots, actions, record=record)
        _require(np.array_equal(before, actions), "chunk_step changed the actions it was given")
        _require(len(results) == len(slots), f"chunk_step: {len(results)} results for {len(slots)} slots")
        for result in results:
            result.check(self.spec, f"chunk_step of {self.spec.name}")
            steps, length = len(result.valid), actions.shape[1]
            _require(steps == length, f"chunk_step: results of {steps} steps for a chunk of {length}")
        return results

    def _run(self, slot: int, actions: np.ndarray, record: bool = False) -> ChunkResult:
        return self._results([slot], actions[None], record)[0]

    def _random_chunk(self) -> np.ndarray:
        return self.random.uniform(self.low, self.high, (self.chunk, self.spec.action_dim)).astype(np.float32)

    def _refuses(self, what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception:
            return
        raise EnvCheckError(f"{what} was accepted; expected an exception")


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise EnvCheckError(message)


def _same(a: Observation, b: Observation) -> bool:
    return _difference(a, b) == ""


def _difference(a: Observation, b: Observation) -> str:
    """In what two observations differ; empty where they do not."""
    if a.instruction != b.instruction:
        return f"instructions {a.instruction!r} and {b.instruction!r}"
    if a.state.size and float(np.abs(a.state - b.state).max()) > STATE_TOLERANCE:
        return f"state[{int(np.abs(a.state - b.state).argmax())}] by {np.abs(a.state - b.state).max():.3g}"
    for camera in a.images:
        off = float(np.abs(a.images[camera].astype(np.int16) - b.images[camera]).mean())
        if off > PIXEL_TOLERANCE:
            return f"images[{camera}] by {off:.3g} grey levels a pixel"
    return ""
