"""ManiSkill3 behind ``ChunkEnv`` (https://github.com/haosulab/ManiSkill, 3.0).

Conventions, so that nobody has to guess:

* World: metres, z up, the table's top at z = 0. The robot stands at x = -0.615 and looks along +x.
* ``base_camera`` faces the robot: +y is on the right of the image and +x towards the viewer (down). ``hand_camera``
  sits on the Panda's wrist and looks along the fingers.
* State: joint positions (rad; fingers m) and what ManiSkill itself gives with images, in its order (for PickCube-v1:
  whether the cube is grasped, the pose of the tool centre point as position and quaternion wxyz, the goal's position).
* Action (``pd_ee_delta_pose``, each in [-1, 1]): translation of the tool centre point (1.0 asks for 10 cm, of which the
  arm makes about a third within the step), rotation as Euler angles (1.0 asks for -0.1 rad: ManiSkill's sign), both in
  the robot's base frame, then the gripper: -1 closes, 1 opens. 20 control steps a second.
* An episode's initial state is drawn from its ``seed`` alone. How it goes on depends in the last digits on what the
  simulation played before, unless it is built anew for each episode: see ``reconfigure``.

On the CPU each slot has a simulation of its own. With ``sim_backend="gpu"`` one vectorised simulation holds all slots;
that path shares all code below but **has not been run on a GPU yet**.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions
from vla3_plugin.envs import maniskill_sim
from vla3_plugin.envs.maniskill_sim import TASKS, Simulation, Task

SUFFIXES = {  # names of a vector's components, by its length
    3: ("x", "y", "z"),
    4: ("qw", "qx", "qy", "qz"),
    7: ("x", "y", "z", "qw", "qx", "qy", "qz"),
}
ACTION_NAMES = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]

Act = Callable[[int], np.ndarray]  # slot -> float32 [A], asked once a control step


class ManiSkillEnv:
    """ManiSkill environments; see the module's docstring for conventions and ``ChunkEnv`` for the interface.

    Args:
        num_slots: environments of this process. The first costs about 0.8 GB, each further one a few MB.
        task: any of ManiSkill's ids; defaults for instruction, step limit and view exist for ``TASKS``.
        max_steps: control steps until truncation.
        camera_size: height and width of every image in pixels.
        cameras: the task's and robot's camera ids, in this order; empty: no rendering.
        views: ``{camera: {"eye": [x, y, z], "target": [x, y, z], "fov": rad}}``, placements other than the default.
        robot: ManiSkill's robot id. None: ``panda_wristcam`` if ``hand_camera`` is asked for, else the task's own.
        control_mode: the robot's controller; the policy's actions are in its units.
        light_meshes: draw the robot with simplified meshes and no floor: several times as fast in software; physics
            is untouched.
        sim_backend: "cpu", "gpu" or "auto" (GPU where CUDA is found).
        render_backend: "cpu", "gpu" or "auto" (as the simulation). ManiSkill draws while it builds a scene, so it needs
            one with ``cameras`` empty too.
        shader: "minimal", "default" or "rt".
        reward: "sparse" gives ``reward_coef`` once, at the episode's first success; "relative" gives +-``reward_coef``
            when success begins and ends, which differs only with ``ignore_terminations``; "dense" is ManiSkill's
            normalised dense reward times ``reward_coef``; "progress" is by how much a control step raised that: an
            episode gets in all what its last state is worth above its first, so it may end at success and lose nothing.
        ignore_terminations: go on after success (and failure) until ``max_steps``: episodes of fixed length.
        reconfigure: build the scene anew at every reset (ManiSkill's word), about 0.15 s each without a GPU: the one
            way to episodes that do not depend, not even in their last digit, on those played before. A run resumed
            elsewhere is then the uninterrupted one.
        instruction: instead of the task's own.
        privileged_state: append the pose of every movable object to the state. For experts and tests.
    """

    def __init__(
        self,
        num_slots: int = 1,
        task: str = "PickCube-v1",
        max_steps: Optional[int] = None,
        camera_size: int = 64,
        cameras: Sequence[str] = ("base_camera", "hand_camera"),
        views: Optional[dict[str, dict[str, Any]]] = None,
        robot: Optional[str] = None,
        control_mode: str = "pd_ee_delta_pose",
        light_meshes: bool = True,
        sim_backend: str = "auto",
        render_backend: str = "auto",
        shader: str = "minimal",
        reward: str = "sparse",
        reward_coef: float = 1.0,
        ignore_terminations: bool = False,
        reconfigure: bool = False,
        instruction: Optional[str] = None,
        privileged_state: bool = False,
    ) -> None:
        for name, value, choices in (
            ("sim_backend", sim_backend, ("auto", "cpu", "gpu")),
            ("render_backend", render_backend, ("auto", "cpu", "gpu")),
            ("shader", shader, ("minimal", "default", "rt")),
            ("reward", reward, ("sparse", "relative", "dense", "progress")),
        ):
            if value not in choices:
                raise ValueError(f"env.{name} is {value!r}, expected one of {list(choices)}")
        if num_slots < 1 or camera_size < 1 or (max_steps is not None and max_steps < 1):
            raise ValueError(
                f"env: num_slots={num_slots}, camera_size={camera_size}, max_steps={max_steps}: expected at least 1"
            )
        defaults = TASKS.get(task, Task(task.rsplit("-v", 1)[0], 100))
        self.num_slots = num_slots
        self._task, self._instruction = task, instruction or defaults.instruction
        self._cameras, self._size = list(cameras), int(camera_size)
        self._reward, self._reward_coef = reward, float(reward_coef)
        self._ignore_terminations = ignore_terminations
        self._gpu = sim_backend == "gpu" or (sim_backend == "auto" and maniskill_sim.cuda_found())
        settings: dict[str, Any] = {
            "task": task,
            "robot": robot or ("panda_wristcam" if "hand_camera" in cameras else "panda" if task in TASKS else None),
            "control_mode": control_mode,
            "cameras": self._cameras,
            "views": {**({"base_camera": defaults.view} if task in TASKS else {}), **(views or {})},
            "size": self._size,
            "shader": shader,
            "reward": reward,
            "light": light_meshes,
            "gpu": self._gpu,
            "render_backend": ("gpu" if self._gpu else "cpu") if render_backend == "auto" else render_backend,
            "privileged": privileged_state,
            "reconfigure": reconfigure,
        }
        if self._gpu and reward == "progress" and num_slots > 1:
            raise ValueError(
                f"env.reward is 'progress' and {num_slots} slots share a GPU simulation: a first state may have the "
                "contacts of the episode before; set env.reward: dense, or vla3.env.envs_per_shard: 1"
            )
        if self._gpu and reconfigure and num_slots > 1:
            raise ValueError(
                f"env.reconfigure is true and {num_slots} slots share a GPU simulation: one slot's reset would end the "
                "others' episodes; set env.reconfigure: false, or vla3.env.envs_per_shard: 1"
            )
        if self._gpu:
            self._sims = [Simulation(num_envs=num_slots, **settings)]
            self._place = [(0, row) for row in range(num_slots)]
        else:
            self._sims = [Simulation(num_envs=1, **settings) for _ in range(num_slots)]
            self._place = [(i, 0) for i in range(num_slots)]
        self._slots = [_Slot() for _ in range(num_slots)]
        space = self._sims[0].env.single_action_space
        dim = int(space.shape[0])
        self.spec = EnvSpec(
            name=task,
            cameras={camera: (self._size, self._size) for camera in self._cameras},
            state_names=_state_names(self._sims[0]),
            action_names=list(ACTION_NAMES) if dim == len(ACTION_NAMES) else [f"action_{i}" for i in range(dim)],
            action_low=[float(v) for v in space.low],
            action_high=[float(v) for v in space.high],
            max_steps=defaults.max_steps if max_steps is None else int(max_steps),
            control_hz=float(self._sims[0].env.control_freq),
            success="ManiSkill's own verdict on the task, after any control step of the episode",
            instructions=[self._instruction],
        )

    # -- ChunkEnv ------------------------------------------------------------------------------------------------------

    def reset(self, slot: int, episode: Episode) -> Observation:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"{self._task}: slot {slot} asked for, expected 0 to {self.num_slots - 1}")
        if episode.task_id != 0 or episode.init_state_id != 0:
            raise ValueError(
                f"{self._task}: episode {episode.episode_id} has task_id={episode.task_id} and init_state_id="
                f"{episode.init_state_id}; both must be 0: there is one task and the seed draws its initial state"
            )
        sim, row = self._sim_of(slot)
        sim.reset(row, episode.seed)
        self._slots[slot] = _Slot(running=True, worth=sim.worth()[row] if self._reward == "progress" else 0.0)
        return self._observation(sim.capture(self._canvas(sim.env.num_envs)), row, own=True)

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        check_actions(actions, self.spec, f"{self._task}: chunk_step")
        if len(actions) != len(slots):
            raise ValueError(f"{self._task}: {len(actions)} action chunks for {len(slots)} slots")
        waiting = {slot: iter(actions[i]) for i, slot in enumerate(slots)}
        return self._execute(slots, actions.shape[1], lambda slot: next(waiting[slot]), record)

    def close(self) -> None:
        for sim in self._sims:
            sim.env.close()
        self._sims, self._slots = [], []

    # -- inside --------------------------------------------------------------------------------------------------------

    def _sim_of(self, slot: int) -> tuple[Simulation, int]:
        index, row = self._place[slot]
        return self._sims[index], row

    def _canvas(self, rows: int) -> np.ndarray:
        """Memory for what every camera sees of every row, in one piece, so that a batch of it needs no copy."""
        return np.empty((rows, len(self._cameras), self._size, self._size, 3), np.uint8)

    def _observation(self, raw: dict[str, Any], row: int, own: bool) -> Observation:
        """``own``: of this row alone, and not kept with what all rows show."""
        shown = raw["images"][row].copy() if own else raw["images"][row]
        return Observation(
            images=dict(zip(self._cameras, shown)),
            state=np.concatenate([np.ravel(value[row]) for value in raw["state"].values()]).astype(np.float32),
            instruction=self._instruction,
        )

    def _execute(self, slots: Sequence[int], length: int, act: Act, record: bool) -> list[ChunkResult]:
        """Drive ``slots`` for up to ``length`` control steps with ``act``."""
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self._slots[slot].running:
                raise RuntimeError(f"{self._task}: chunk_step in slot {slot} before reset, or after its episode ended")
        results: dict[int, ChunkResult] = {}
        canvas = self._canvas(self.num_slots)
        for index, sim in enumerate(self._sims):
            here = [slot for slot in range(self.num_slots) if self._place[slot][0] == index]
            rows = {slot: self._place[slot][1] for slot in here if slot in slots}
            left_out = [slot for slot in here if slot not in slots and self._slots[slot].running]
            if rows and left_out:
                raise RuntimeError(
                    f"{self._task}: slots {left_out} have running episodes and share a GPU simulation with slots "
                    f"{list(rows)}: they can only be stepped together"
                )
            if rows:
                part = canvas[here[0] : here[0] + len(here)]
                results.update(self._execute_sim(sim, rows, length, act, record, part))
        return [results[slot] for slot in slots]

    def _execute_sim(
        self, sim: Simulation, rows: dict[int, int], length: int, act: Act, record: bool, canvas: np.ndarray
    ) -> dict[int, ChunkResult]:
        """``rows``: slot to row of the simulation. Images are drawn where they are needed: at an episode's end and at
        the chunk's, after every step for a recording. The last are drawn into ``canvas``."""
        log = {slot: _Log(length) for slot in rows}
        results: dict[int, ChunkResult] = {}
        live = list(rows)
        for step in range(length):
            actions = np.zeros((sim.env.num_envs, self.spec.action_dim), np.float32)
            for slot in live:
                actions[rows[slot]] = act(slot)
            success, fail, dense = sim.step(actions)
            for slot in live:
                row = rows[slot]
                self._book(self._slots[slot], log[slot], step, bool(success[row]), bool(fail[row]), float(dense[row]))
            alive = [slot for slot in live if self._slots[slot].running]
            finished = live if step == length - 1 else [slot for slot in live if slot not in alive]
            if record or finished:
                last = len(finished) == len(live)
                raw = sim.capture(canvas if last else self._canvas(sim.env.num_envs))
                for slot in live if record and self._cameras else []:
                    log[slot].frames.append(raw["images"][rows[slot], 0].copy())
                for slot in finished:
                    shown = self._observation(raw, rows[slot], own=not last)
                    results[slot] = log[slot].result(self._slots[slot], shown)
            live = alive
            if not live:
                break
        return results

    def _book(self, slot: _Slot, log: _Log, step: int, success: bool, fail: bool, dense: float) -> None:
        """Account for one control step of one slot."""
        slot.steps += 1
        if self._reward == "dense":
            reward = dense
        elif self._reward == "progress":
            reward, slot.worth = dense - slot.worth, dense
        elif self._reward == "relative":
            reward = float(success) - float(slot.success)
        else:
            reward = float(success and not slot.succeeded)
        slot.success, slot.succeeded = success, slot.succeeded or success
        log.rewards[step] = self._reward_coef * reward
        log.valid[step] = True
        log.terminated[step] = (success or fail) and not self._ignore_terminations
        log.truncated[step] = slot.steps >= self.spec.max_steps and not log.terminated[step]
        slot.running = not (log.terminated[step] or log.truncated[step])


def _state_names(sim: Simulation) -> list[str]:
    names = []
    for name, value in sim.capture()["state"].items():
        width = int(np.prod(value.shape[1:]))
        parts = SUFFIXES.get(width, tuple(str(i) for i in range(width)))
        if name == "qpos":
            names += [joint.name for joint in sim.env.agent.robot.active_joints]
        else:
            names += [name] if width == 1 else [f"{name}_{part}" for part in parts]
    return names


class _Slot:
    """Where an episode stands."""

    def __init__(self, running: bool = False, worth: float = 0.0) -> None:
        self.running, self.steps = running, 0
        self.worth = worth  # of the present state
        self.success = self.succeeded = False  # now; now or earlier


class _Log:
    """What the steps of one chunk gave in one slot."""

    def __init__(self, length: int) -> None:
        self.rewards = np.zeros(length, np.float32)
        self.terminated, self.truncated, self.valid = (np.zeros(length, np.bool_) for _ in range(3))
        self.frames: list[np.ndarray] = []

    def result(self, slot: _Slot, observation: Observation) -> ChunkResult:
        return ChunkResult(
            rewards=self.rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            valid=self.valid,
            success=slot.succeeded,
            observation=observation,
            final_observation=None if slot.running else observation,
            frames=np.stack(self.frames) if self.frames else None,
        )
