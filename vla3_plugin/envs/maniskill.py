"""ManiSkill3 behind ``ChunkEnv`` (https://github.com/haosulab/ManiSkill, 3.0).

Conventions, so that nobody has to guess:

* World: metres, z up, the table's top at z = 0. The robot stands at x = -0.615 and looks along +x.
* ``base_camera`` faces the robot: +y is on the right of the image and +x towards the viewer (down). ``hand_camera``
  sits on the Panda's wrist and looks along the fingers.
* State: joint positions (rad; fingers m) and what ManiSkill itself gives with images, in its order (for PickCube-v1:
  whether the cube is grasped, the pose of the tool centre point as position and quaternion wxyz, the goal's position).
* Action (``pd_ee_delta_pose``, each in [-1, 1]): translation of the tool centre point (1.0 asks for 10 cm, of which the
  arm makes about a quarter within the step), rotation as Euler angles (1.0 asks for -0.1 rad: ManiSkill's sign), both
  in the robot's base frame, then the gripper: -1 closes, 1 opens. 20 control steps a second.
* Reward "sparse" is 1.0 at the first step with success; success ends the episode.

On the CPU each slot has a simulation of its own. With ``sim_backend="gpu"`` one vectorised simulation holds all slots;
that path shares all code below but **has not been run on a GPU yet**.
"""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions


@dataclass(frozen=True)
class Task:
    """Defaults of a task: its instruction, control steps until truncation, view of ``base_camera``."""

    instruction: str
    max_steps: int
    eye: tuple[float, float, float] = (0.45, 0.0, 0.5)
    target: tuple[float, float, float] = (0.0, 0.0, 0.1)
    fov: float = 0.7


TASKS = {
    "PickCube-v1": Task("pick up the cube and move it to the goal", 64),
    "PushCube-v1": Task("push the cube forward into the goal region", 48, target=(0.06, 0.0, 0.05)),
    "StackCube-v1": Task("put the red cube on the green cube", 96, fov=0.9),
}
SUFFIXES = {  # names of a vector's components, by its length
    3: ("x", "y", "z"),
    4: ("qw", "qx", "qy", "qz"),
    7: ("x", "y", "z", "qw", "qx", "qy", "qz"),
}
ACTION_NAMES = ["dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"]
SCENERY = ("table-workspace", "ground")
FACES_PER_MESH = 1000
VULKAN = (
    "ManiSkill renders with Vulkan and found no usable device. Without a GPU it needs Mesa's software Vulkan 24.3 or "
    "newer; on Debian 12 from backports: apt-get install -y libvulkan1 && apt-get install -y -t bookworm-backports "
    "mesa-vulkan-drivers"
)

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
        robot: ManiSkill's robot id. None: ``panda_wristcam`` if ``hand_camera`` is asked for, else ``panda``.
        control_mode: the robot's controller; the policy's actions are in its units.
        light_meshes: draw the robot with simplified meshes and no floor: 5 times as fast in software, physics untouched.
        sim_backend: "cpu", "gpu" or "auto" (GPU where CUDA is found).
        render_backend: "cpu", "gpu", "none" or "auto" (as the simulation).
        shader: "minimal", "default" or "rt".
        reward: "sparse" gives ``reward_coef`` once, at the episode's first success; "relative" gives +-``reward_coef``
            when success begins and ends, which differs only with ``ignore_terminations``; "dense" is ManiSkill's
            normalised dense reward times ``reward_coef``.
        ignore_terminations: go on after success (and failure) until ``max_steps``: episodes of fixed length.
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
        instruction: Optional[str] = None,
        privileged_state: bool = False,
    ) -> None:
        for name, value, choices in (
            ("sim_backend", sim_backend, ("auto", "cpu", "gpu")),
            ("render_backend", render_backend, ("auto", "cpu", "gpu", "none")),
            ("shader", shader, ("minimal", "default", "rt")),
            ("reward", reward, ("sparse", "relative", "dense")),
        ):
            if value not in choices:
                raise ValueError(f"env.{name} is {value!r}, expected one of {list(choices)}")
        if num_slots < 1 or camera_size < 1 or (max_steps is not None and max_steps < 1):
            raise ValueError(
                f"env: num_slots={num_slots}, camera_size={camera_size}, max_steps={max_steps}: expected at least 1"
            )
        defaults = TASKS.get(task, Task(task.rsplit("-v", 1)[0], 100))
        self.num_slots = num_slots
        self._task, self._robot = task, robot or ("panda_wristcam" if "hand_camera" in cameras else "panda")
        self._cameras, self._size, self._shader = list(cameras), int(camera_size), shader
        base = {"eye": defaults.eye, "target": defaults.target, "fov": defaults.fov}
        self._views = {**({"base_camera": base} if task in TASKS else {}), **(views or {})}
        self._control_mode = control_mode
        self._light = light_meshes
        self._reward, self._reward_coef = reward, float(reward_coef)
        self._ignore_terminations = ignore_terminations
        self._privileged = privileged_state
        self._gpu = sim_backend == "gpu" or (sim_backend == "auto" and _cuda_found())
        if render_backend == "none" and cameras:
            raise ValueError(f"env.render_backend is 'none' but env.cameras is {list(cameras)}; set env.cameras: []")
        self._render_backend = ("gpu" if self._gpu else "cpu") if render_backend == "auto" else render_backend
        if self._gpu:
            self._sims = [self._make(num_slots)]
            self._place = [(0, row) for row in range(num_slots)]
        else:
            self._sims = [self._make(1) for _ in range(num_slots)]
            self._place = [(i, 0) for i in range(num_slots)]
        self._slots = [_Slot() for _ in range(num_slots)]
        sim = self._sims[0]
        if unknown := [c for c in self._cameras if c not in sim.scene.sensors]:
            raise ValueError(f"env.cameras names {unknown}, {task} with {self._robot} has {sorted(sim.scene.sensors)}")
        self._raw = self._capture(sim, images=False)
        space = sim.single_action_space
        dim = int(space.shape[0])
        self._instruction = instruction or defaults.instruction
        self.spec = EnvSpec(
            name=task,
            cameras={camera: (self._size, self._size) for camera in self._cameras},
            state_names=self._state_names(sim),
            action_names=ACTION_NAMES if dim == len(ACTION_NAMES) else [f"action_{i}" for i in range(dim)],
            action_low=[float(v) for v in space.low],
            action_high=[float(v) for v in space.high],
            max_steps=defaults.max_steps if max_steps is None else int(max_steps),
            control_hz=float(sim.control_freq),
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
                f"{episode.init_state_id}; both must be 0: there is one task, and its initial state is drawn from the seed"
            )
        import torch

        sim, row = self._sim_of(slot)
        options = {"env_idx": torch.tensor([row], device=sim.device)} if self._gpu else {}
        _quiet(sim)
        sim.reset(seed=[episode.seed % 2**32], options=options)
        self._slots[slot] = _Slot(running=True)
        return self._observation(self._capture(sim), row)

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        check_actions(actions, self.spec, f"{self._task}: chunk_step")
        if len(actions) != len(slots):
            raise ValueError(f"{self._task}: {len(actions)} action chunks for {len(slots)} slots")
        chunks = dict(zip(slots, actions))
        counts = dict.fromkeys(slots, -1)

        def act(slot: int) -> np.ndarray:
            counts[slot] += 1
            return chunks[slot][counts[slot]]

        return self._execute(slots, actions.shape[1], act, record)

    def close(self) -> None:
        for sim in self._sims:
            sim.close()
        self._sims, self._slots = [], []

    # -- inside --------------------------------------------------------------------------------------------------------

    def _sim_of(self, slot: int) -> tuple[Any, int]:
        index, row = self._place[slot]
        return self._sims[index], row

    def _make(self, num_envs: int) -> Any:
        """ManiSkill's ``BaseEnv`` without wrappers; its ``step`` and ``reset`` draw nothing (see ``_capture``)."""
        try:
            import gymnasium
            import mani_skill.envs  # noqa: F401  registers the tasks
            import sapien
            from mani_skill.utils.sapien_utils import look_at
        except ImportError as error:
            raise ImportError(f"{error}; ManiSkill is installed with: pip install 'vla3-plugin[maniskill]'") from error
        if self._light:
            _use_light_robot(self._robot)
        sensors: dict[str, Any] = {"width": self._size, "height": self._size, "shader_pack": self._shader}
        for camera, view in self._views.items():
            pose = look_at(eye=list(view["eye"]), target=list(view["target"])).raw_pose[0].cpu().numpy()
            sensors[camera] = {"pose": sapien.Pose(pose[:3], pose[3:]), "fov": float(view["fov"])}
        try:
            sim = gymnasium.make(
                self._task,
                num_envs=num_envs,
                robot_uids=self._robot,
                obs_mode="rgb",
                control_mode=self._control_mode,
                reward_mode="normalized_dense" if self._reward == "dense" else "none",
                sim_backend="physx_cuda" if self._gpu else "physx_cpu",
                render_backend=self._render_backend,
                sensor_configs=copy.deepcopy(sensors),
            ).unwrapped
        except gymnasium.error.UnregisteredEnv as error:
            from mani_skill.utils.registration import REGISTERED_ENVS

            near = difflib.get_close_matches(self._task, REGISTERED_ENVS, 5, 0.4)
            raise ValueError(f"env.task is {self._task!r}, not one of ManiSkill's tasks; near: {near}") from error
        except EOFError as error:
            raise RuntimeError(
                f"{self._task} needs assets that are not on this machine; fetch them with: "
                f"python -m mani_skill.utils.download_asset {self._task}"
            ) from error
        except RuntimeError as error:
            if "physical device" in str(error) or "ulkan" in str(error):
                raise RuntimeError(f"{VULKAN}. (ManiSkill said: {error})") from error
            raise
        if self._light and not self._gpu and "ground" in sim.scene.actors:
            for entity in sim.scene.actors["ground"]._objs:
                entity.find_component_by_type(sapien.render.RenderBodyComponent).visibility = 0
        sim.draw_sensors = sim._get_obs_sensor_data
        return sim

    def _capture(self, sim: Any, images: bool = True) -> dict[str, Any]:
        """What ManiSkill shows now, as numpy arrays with a leading axis of environments: ``agent``, ``extra``, images.

        ``step`` and ``reset`` observe, and drawing is what costs: 2 ms a step without, 10 to 30 with. So the drawing is
        taken out of them (``_quiet``) and done here, once a chunk.
        """
        _quiet(sim)
        observed = sim.get_obs(unflattened=True)
        raw = {
            "qpos": _numpy(observed["agent"]["qpos"]),
            "extra": {name: _numpy(value) for name, value in observed["extra"].items()},
        }
        if self._privileged:
            for name, actor in sim.scene.actors.items():
                if name not in SCENERY:
                    raw["extra"][name] = _numpy(actor.pose.raw_pose)
        if images and self._cameras:
            for sensor in [s for s in sim.scene.sensors if s not in self._cameras]:
                del sim.scene.sensors[sensor]
            drawn = sim.draw_sensors()
            raw["images"] = {camera: _numpy(drawn[camera]["rgb"]).astype(np.uint8) for camera in self._cameras}
        return raw

    def _state_names(self, sim: Any) -> list[str]:
        names = [joint.name for joint in sim.agent.robot.active_joints]
        for name, value in self._raw["extra"].items():
            width = int(np.prod(value.shape[1:]))
            parts = SUFFIXES.get(width, tuple(str(i) for i in range(width)))
            names += [name] if width == 1 else [f"{name}_{part}" for part in parts]
        return names

    def _observation(self, raw: dict[str, Any], row: int) -> Observation:
        parts = [raw["qpos"][row], *(np.ravel(value[row]) for value in raw["extra"].values())]
        return Observation(
            images={camera: raw["images"][camera][row].copy() for camera in self._cameras},
            state=np.concatenate(parts).astype(np.float32),
            instruction=self._instruction,
        )

    def _execute(self, slots: Sequence[int], length: int, act: Act, record: bool) -> list[ChunkResult]:
        """Drive ``slots`` for up to ``length`` control steps with ``act``."""
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self._slots[slot].running:
                raise RuntimeError(f"{self._task}: chunk_step in slot {slot} before reset, or after its episode ended")
        results: dict[int, ChunkResult] = {}
        for index, sim in enumerate(self._sims):
            rows = {slot: self._place[slot][1] for slot in slots if self._place[slot][0] == index}
            left_out = [s for s, slot in enumerate(self._slots) if slot.running and self._place[s][0] == index]
            if rows and (left_out := [s for s in left_out if s not in rows]):
                raise RuntimeError(
                    f"{self._task}: slots {left_out} have running episodes and share a GPU simulation with {list(rows)}: "
                    "they can only be stepped together"
                )
            if rows:
                results.update(self._execute_sim(sim, rows, length, act, record))
        return [results[slot] for slot in slots]

    def _execute_sim(self, sim: Any, rows: dict[int, int], length: int, act: Act, record: bool) -> dict[int, ChunkResult]:
        log = {slot: _Log(length) for slot in rows}
        results: dict[int, ChunkResult] = {}
        raw: Optional[dict[str, Any]] = None
        for step in range(length):
            live = [slot for slot in rows if self._slots[slot].running]
            if not live:
                break
            actions = np.zeros((sim.num_envs, self.spec.action_dim), np.float32)
            for slot in live:
                actions[rows[slot]] = act(slot)
            _quiet(sim)
            _, dense, _, _, info = sim.step(actions)
            success, fail = (_numpy(info[n]) if n in info else np.zeros(sim.num_envs, bool) for n in ("success", "fail"))
            dense = _numpy(dense)
            for slot in live:
                row = rows[slot]
                self._advance(self._slots[slot], log[slot], step, bool(success[row]), bool(fail[row]), float(dense[row]))
            ended = [slot for slot in live if not self._slots[slot].running]
            last = step == length - 1 or len(ended) == len(live)
            raw = self._capture(sim) if record or ended or last else None
            if raw is not None and record and self._cameras:
                for slot in live:
                    log[slot].frames.append(raw["images"][self._cameras[0]][rows[slot]].copy())
            for slot in live if last else ended:
                assert raw is not None
                results[slot] = log[slot].result(self._slots[slot], self._observation(raw, rows[slot]))
        return results

    def _advance(self, slot: _Slot, log: _Log, step: int, success: bool, fail: bool, dense: float) -> None:
        """Book one control step of one slot."""
        slot.steps += 1
        if self._reward == "dense":
            reward = dense
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


class _Slot:
    """Where an episode stands."""

    def __init__(self, running: bool = False) -> None:
        self.running, self.steps = running, 0
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


def _quiet(sim: Any) -> None:
    """Take drawing out of ``sim``'s own observations; ``draw_sensors`` still draws."""
    sim._get_obs_sensor_data = lambda *_, **__: {}
    sim.get_sensor_params = dict


def _numpy(value: Any) -> np.ndarray:
    return value.cpu().numpy() if hasattr(value, "cpu") else np.asarray(value)


def _cuda_found() -> bool:
    try:
        import torch

        return bool(torch.cuda.is_available())
    except ImportError:  # ManiSkill's import says what is missing
        return False


def _use_light_robot(uid: str) -> None:
    """Let ManiSkill build robot ``uid`` with light meshes. The id stays, since scenes place robots by it."""
    from mani_skill.agents.registration import REGISTERED_AGENTS

    from vla3_plugin.envs.maniskill_meshes import light_urdf

    entry = REGISTERED_AGENTS.get(uid)
    if entry is None:
        raise ValueError(f"env.robot is {uid!r}, ManiSkill has {sorted(REGISTERED_AGENTS)}")
    stock = entry.agent_cls
    if stock.urdf_path and not getattr(stock, "vla3_light", False):
        path = light_urdf(stock.urdf_path, FACES_PER_MESH)
        entry.agent_cls = type(stock.__name__, (stock,), {"urdf_path": path, "vla3_light": True})
