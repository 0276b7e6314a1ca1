"""LIBERO behind ``ChunkEnv``: five suites of language-conditioned manipulation (https://libero-project.github.io).

Conventions, so that nobody has to guess:

* Images are upright RGB as a person in front of the robot sees them: the robot at the top of ``agentview``, its +y on
  the right. MuJoCo hands frames over bottom row first and they are flipped vertically. Projects that rotate raw frames
  by 180 degrees instead (OpenVLA, openpi and what follows them) train on the left-right mirror of these; a policy made
  by them wants ``mirrored=True``.
* State (float32 [8]): end-effector position (3, m, world), orientation as axis-angle (3, rad, angle in [0, 2 pi)) and
  the two finger joints (2, m, about +0.04 / -0.04 when open).
* Action (float32 [7], each in [-1, 1]): end-effector translation (1.0 asks for 5 cm) and axis-angle rotation (1.0 asks
  for 0.5 rad) in the world frame, then the gripper: negative opens, positive closes, 0 keeps the last command; its size
  does not matter. 20 control steps a second.
* The episode's ``init_state_id`` picks the published initial state (robot and movable objects); its ``seed`` fixes what
  these states leave open, the placement of fixtures such as the cabinet and the stove (some millimetres).
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions
from vla3_plugin.envs import libero_setup

MAX_STEPS = {  # as in the published OpenVLA evaluation
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}  # ours: LIBERO's
STATE_NAMES = ["eef_x", "eef_y", "eef_z", "eef_ax", "eef_ay", "eef_az", "finger_left", "finger_right"]
PRIVILEGED_NAMES = [f"object_{c}" for c in ("x", "y", "z", "qx", "qy", "qz", "qw")] + ["goal_x", "goal_y", "goal_z"]
ACTION_NAMES = ["dx", "dy", "dz", "dax", "day", "daz", "gripper"]
WAIT = np.array([0, 0, 0, 0, 0, 0, -1.0])  # stand still, gripper open


class LiberoEnv:
    """One LIBERO environment; see the module's docstring for conventions and ``ChunkEnv`` for the interface.

    Args:
        num_slots: must be 1. Each environment needs about 1 GB, seeds numpy's global generator and owns an OpenGL
            context; parallel environments are parallel processes.
        suite: libero_spatial, libero_object, libero_goal, libero_10 or libero_90.
        tasks: task numbers of the suite; ``Episode.task_id`` counts within this list. None: the whole suite.
        max_steps: control steps until truncation, without the settling steps. None: the published limit of the suite.
        camera_size: height and width of every image in pixels.
        cameras: any of "agentview" and "wrist", in this order; empty: no rendering at all.
        mirrored: show the policy the left-right mirror of every image, as public checkpoints were trained on them.
            Videos stay as they are.
        settle_steps: control steps of standing still after a reset, while objects drop into place.
        reward: "sparse" gives ``reward_coef`` once, at the episode's first success; "relative" gives +-``reward_coef``
            when success begins and ends, which differs only with ``ignore_terminations``.
        ignore_terminations: go on after success until ``max_steps`` (episodes of fixed length).
        hard_reset: rebuild the model at every reset instead of resetting it. Slower by 0.4 to 1.5 s; same result.
        reflections: draw reflections (tables of the spatial, goal and kitchen scenes). Off: up to twice as fast.
        light_meshes_mm: merge mesh vertices closer than this many millimetres *for drawing*; physics is untouched.
            0: draw all. At 64 px, 8 changes a pixel by about 1/255 and draws 5 times as fast in software.
        render_backend: "egl", "osmesa", or "auto" for EGL where it finds a device.
        privileged_state: append pose (position, quaternion xyzw) of the first goal's object and the position of its
            destination to the state.
    """

    def __init__(
        self,
        num_slots: int = 1,
        suite: str = "libero_object",
        tasks: Optional[Sequence[int]] = None,
        max_steps: Optional[int] = None,
        camera_size: int = 128,
        cameras: Sequence[str] = ("agentview", "wrist"),
        mirrored: bool = False,
        settle_steps: int = 15,
        reward: str = "sparse",
        reward_coef: float = 1.0,
        ignore_terminations: bool = False,
        hard_reset: bool = False,
        reflections: bool = True,
        light_meshes_mm: float = 0.0,
        render_backend: str = "auto",
        privileged_state: bool = False,
    ) -> None:
        if num_slots != 1:
            raise ValueError(
                f"env.num_slots is {num_slots}, but LIBERO runs one environment a process: several share one OpenGL "
                "context and numpy's global seed, and each takes about 1 GB. Raise the number of env workers instead"
            )
        if suite not in MAX_STEPS:
            raise ValueError(f"env.suite is {suite!r}, expected one of {list(MAX_STEPS)}")
        if unknown := [c for c in cameras if c not in CAMERAS]:
            raise ValueError(f"env.cameras names {unknown}, expected some of {list(CAMERAS)}")
        if reward not in ("sparse", "relative"):
            raise ValueError(f"env.reward is {reward!r}, expected 'sparse' or 'relative'")
        if settle_steps < 0 or camera_size < 1 or light_meshes_mm < 0 or (max_steps is not None and max_steps < 1):
            raise ValueError(
                f"env: settle_steps={settle_steps}, camera_size={camera_size}, light_meshes_mm={light_meshes_mm}, "
                f"max_steps={max_steps}: the first and third must be at least 0, the others at least 1"
            )
        self.num_slots = 1
        self._cameras = list(cameras)
        self._size = int(camera_size)
        self._mirrored = bool(mirrored)
        self._settle_steps = int(settle_steps)
        self._reward = reward
        self._reward_coef = float(reward_coef)
        self._ignore_terminations = ignore_terminations
        self._hard_reset = hard_reset
        self._reflections = reflections
        self._light_meshes = light_meshes_mm / 1000
        self._privileged = privileged_state

        libero_setup.choose_backend(render_backend)
        self._libero = libero_setup.import_libero()
        suite_tasks = libero_setup.load_tasks(self._libero, suite)
        numbers = list(range(len(suite_tasks))) if tasks is None else [int(t) for t in tasks]
        if not numbers or any(not 0 <= t < len(suite_tasks) for t in numbers):
            raise ValueError(f"env.tasks is {tasks}, expected numbers from 0 to {len(suite_tasks) - 1} of {suite}")
        self._tasks = [suite_tasks[t] for t in numbers]
        self._init_states = [libero_setup.load_init_states(self._libero, task) for task in self._tasks]
        self.spec = EnvSpec(
            name=suite,
            cameras={camera: (self._size, self._size) for camera in self._cameras},
            state_names=STATE_NAMES + (PRIVILEGED_NAMES if privileged_state else []),
            action_names=list(ACTION_NAMES),
            action_low=[-1.0] * 7,
            action_high=[1.0] * 7,
            max_steps=MAX_STEPS[suite] if max_steps is None else int(max_steps),
            control_hz=20.0,
            success="all predicates of the task's goal hold after the same control step",
            num_tasks=len(self._tasks),
            num_init_states=min(len(states) for states in self._init_states),
            instructions=[task.language for task in self._tasks],
        )
        self._task_id: Optional[int] = None
        self._sim_env: Any = None  # robosuite's environment of the current task
        self._renderer: Optional[_Renderer] = None
        self._running = False
        self._steps = 0
        self._success = False  # now
        self._succeeded = False  # now or earlier in the episode

    # -- ChunkEnv ------------------------------------------------------------------------------------------------------

    def reset(self, slot: int, episode: Episode) -> Observation:
        self._check_slots([slot])
        for name, value, count in (
            ("task_id", episode.task_id, self.spec.num_tasks),
            ("init_state_id", episode.init_state_id, self.spec.num_init_states),
        ):
            if not 0 <= value < count:
                raise ValueError(f"{self.spec.name}: the episode's {name} is {value}, expected 0 to {count - 1}")
        if episode.task_id != self._task_id:
            self._build(episode.task_id)
        env = self._sim_env
        np.random.seed(episode.seed % 2**32)  # LIBERO's placement samplers draw from numpy's global generator
        env.reset()
        for robot in env.robots:  # survives robosuite's soft reset; the fingers would start from the last command
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)
        if self._hard_reset:
            self._drop_renderer()  # it belongs to the model that was just replaced
        self._disable_observables()
        env.sim.set_state_from_flattened(self._init_states[episode.task_id][episode.init_state_id])
        env.sim.forward()
        env._post_process()
        for _ in range(self._settle_steps):
            env.step(WAIT)
        self._running, self._steps, self._succeeded = True, 0, False
        self._success = bool(env._check_success())
        return self._observe()

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        self._check_slots(slots)
        check_actions(actions, self.spec, f"{self.spec.name}: chunk_step")
        if len(actions) != len(slots):
            raise ValueError(f"{self.spec.name}: {len(actions)} action chunks for {len(slots)} slots")
        return [self._execute(len(chunk), chunk.__getitem__, record) for chunk in actions]

    def close(self) -> None:
        self._drop_renderer()
        if self._sim_env is not None:
            self._sim_env.close()  # frees the simulation; without it each change of task leaks about 1 GB
            self._sim_env = None
        self._task_id, self._running = None, False

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_slots(self, slots: Sequence[int]) -> None:
        if any(slot != 0 for slot in slots) or len(slots) > 1:
            raise ValueError(f"{self.spec.name}: slots {list(slots)} asked for, but there is only slot 0")

    def _build(self, task_id: int) -> None:
        self.close()
        wrapper = self._libero.envs.env_wrapper.ControlEnv(
            bddl_file_name=libero_setup.bddl_path(self._libero, self._tasks[task_id]),
            # Rendering is ours (``_Renderer``): robosuite's context never makes itself current, and its camera
            # observables draw at every control step.
            use_camera_obs=False,
            has_offscreen_renderer=False,
            hard_reset=self._hard_reset,
            ignore_done=True,  # its own horizon of 1000 steps would count the settling steps
        )
        self._sim_env, self._task_id = wrapper.env, task_id

    def _disable_observables(self) -> None:
        # The state is read from the simulation when a chunk ends; 37 observables a physics step would be for nothing.
        for observable in self._sim_env._observables.values():
            observable.set_enabled(False)

    def _execute(self, length: int, act: Callable[[int], np.ndarray], record: bool) -> ChunkResult:
        """Up to ``length`` control steps of ``act(step)`` [A], until the episode ends; one rendering at the end."""
        if not self._running:
            raise RuntimeError(f"{self.spec.name}: a chunk before the reset, or after the episode's end")
        rewards = np.zeros(length, np.float32)
        terminated, truncated, valid = (np.zeros(length, np.bool_) for _ in range(3))
        frames = []
        for i in range(length):
            rewards[i], terminated[i], truncated[i] = self._control_step(act(i))
            valid[i] = True
            if record and self._cameras:
                frame = np.empty((1, self._size, self._size, 3), np.uint8)
                frames.append(self._render(self._cameras[:1], frame)[self._cameras[0]])
            if terminated[i] or truncated[i]:
                self._running = False
                break
        observation = self._observe()
        return ChunkResult(
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            success=self._succeeded,
            observation=observation,
            final_observation=None if self._running else observation,
            frames=np.stack(frames) if frames else None,
        )

    def _control_step(self, action: np.ndarray) -> tuple[float, bool, bool]:
        """One control step; returns reward, terminated, truncated."""
        before, first = self._success, not self._succeeded
        _, _, success, _ = self._sim_env.step(np.clip(action.astype(np.float64), -1.0, 1.0))
        self._steps += 1
        self._success = bool(success)
        self._succeeded |= self._success
        if self._reward == "relative":
            reward = self._reward_coef * (int(self._success) - int(before))
        else:
            reward = self._reward_coef * float(self._success and first)
        terminated = self._success and not self._ignore_terminations
        return reward, terminated, not terminated and self._steps >= self.spec.max_steps

    def _observe(self) -> Observation:
        assert self._task_id is not None
        # in one piece, so that a batch of it needs no copy
        canvas = np.empty((len(self._cameras), self._size, self._size, 3), np.uint8)
        images = self._render(self._cameras, canvas)
        if self._mirrored:
            canvas[:] = canvas[:, :, ::-1]
        return Observation(images, self._state(), self.spec.instructions[self._task_id])

    def _state(self) -> np.ndarray:
        from robosuite.utils.transform_utils import convert_quat, quat2axisangle

        sim, robot = self._sim_env.sim, self._sim_env.robots[0]
        orientation = convert_quat(np.array(sim.data.get_body_xquat(robot.robot_model.eef_name)), to="xyzw")
        parts = [
            sim.data.site_xpos[robot.eef_site_id],
            quat2axisangle(orientation),
            sim.data.qpos[robot._ref_gripper_joint_pos_indexes],
        ]
        if self._privileged:
            names = self._sim_env.parsed_problem["goal_state"][0][1:]
            states = [self._sim_env.object_states_dict[name].get_geom_state() for name in (names[0], names[-1])]
            parts += [states[0]["pos"], convert_quat(np.array(states[0]["quat"]), to="xyzw"), states[1]["pos"]]
        return np.concatenate(parts).astype(np.float32)

    def _render(self, cameras: Sequence[str], canvas: np.ndarray) -> dict[str, np.ndarray]:
        """What each of ``cameras`` sees, drawn into ``canvas`` uint8 [cameras, H, W, 3]."""
        if not cameras:
            return {}
        if self._renderer is None:
            sim = self._sim_env.sim
            self._renderer = _Renderer(
                sim.model._model, sim.data._data, self._size, self._reflections, self._light_meshes
            )
        for camera, image in zip(cameras, canvas):
            self._renderer(CAMERAS[camera], image)
        return dict(zip(cameras, canvas))

    def _drop_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class _Renderer:
    """MuJoCo's own offscreen renderer with LIBERO's view options: visual geoms only, as robosuite draws them."""

    def __init__(self, model: Any, data: Any, size: int, reflections: bool, cell: float) -> None:
        import mujoco

        self._data = data
        if cell > 0:
            merge_drawn_vertices(model, cell)
        try:
            self._renderer = mujoco.Renderer(model, size, size)
        except Exception as error:  # each backend has errors of its own: ImportError, EGLError, AttributeError, ...
            raise libero_setup.LiberoUnavailable(
                f"LIBERO cannot render: creating the OpenGL context failed ({type(error).__name__}: {error}). "
                f"{libero_setup.GL_INSTALL}, or choose another env.render_backend"
            ) from error
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = reflections
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes
        self._options.geomgroup[1] = 1  # visual meshes

    def __call__(self, camera: str, image: np.ndarray) -> None:
        """Draw into ``image`` uint8 [size, size, 3], upright."""
        self._renderer.update_scene(self._data, camera=camera, scene_option=self._options)
        self._renderer.render(out=image)

    def close(self) -> None:
        self._renderer.close()


def merge_drawn_vertices(model: Any, cell: float) -> None:
    """Drop the faces that vanish when vertices of one cube of edge ``cell`` (metres) are merged, in place.

    Software rendering of LIBERO is bound by its scanned meshes (0.3 to 0.4 million faces a scene). Vertex clustering
    (Rossignac and Borrel 1993) on the face lists alone: each cluster is drawn at its member nearest to the centre.
    Collisions use vertices, hulls and primitive shapes, none of which is touched; nor is anything of the dynamics.
    """
    for mesh in range(model.nmesh):
        first_vertex, first_face = model.mesh_vertadr[mesh], model.mesh_faceadr[mesh]
        vertices = model.mesh_vert[first_vertex : first_vertex + model.mesh_vertnum[mesh]].astype(np.float64)
        faces = slice(first_face, first_face + model.mesh_facenum[mesh])

        cells = np.floor((vertices - vertices.min(0)) / cell).astype(np.int64)
        extent = cells.max(0) + 1
        keys = (cells[:, 0] * extent[1] + cells[:, 1]) * extent[2] + cells[:, 2]
        _, cluster, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        centre = np.stack([np.bincount(cluster, vertices[:, axis]) for axis in range(3)], axis=1) / sizes[:, None]
        order = np.lexsort((((vertices - centre[cluster]) ** 2).sum(1), cluster))
        nearest = order[np.concatenate([[0], np.cumsum(sizes)[:-1]])]
        corners = nearest[cluster][model.mesh_face[faces]]

        kept = np.flatnonzero(
            (corners[:, 0] != corners[:, 1]) & (corners[:, 1] != corners[:, 2]) & (corners[:, 2] != corners[:, 0])
        )
        if len(kept) == 0:  # smaller than a cell: leave it as it is
            continue
        triples = np.sort(corners[kept], axis=1).astype(np.int64)
        count = len(vertices)
        _, distinct = np.unique((triples[:, 0] * count + triples[:, 1]) * count + triples[:, 2], return_index=True)
        kept = kept[np.sort(distinct)]
        target = slice(first_face, first_face + len(kept))
        for name in ("mesh_facenormal", "mesh_facetexcoord"):
            indices = getattr(model, name)
            indices[target] = indices[faces][kept]
        model.mesh_face[target] = corners[kept]
        model.mesh_facenum[mesh] = len(kept)
