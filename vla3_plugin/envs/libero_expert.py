"""A scripted expert with privileged state for LIBERO's pick-and-place suites (object and spatial).

A closed-loop state machine: every action is computed from the present poses of hand, object and destination, so that
it corrects disturbed actions, and it plans anew when it loses the object. It needs no rendering.
"""

from __future__ import annotations

import copy
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from vla3_plugin.contract import Episode, Observation
from vla3_plugin.envs.base import NO_ERROR, ActionNoise, ExpertChunk, check_grasp_error
from vla3_plugin.envs.libero import LiberoEnv

SUITES = ("libero_object", "libero_spatial")

GAIN = 20.0  # action per metre: full speed (about 0.25 m/s) from 5 cm away
TURN_GAIN = 2.0  # action per radian
SLOPE = 4.0  # height kept per metre of horizontal error: the hand comes down in a steep funnel
HOVER = 0.12  # m above the grasp point at which the hand travels
CLOSE_STEPS, OPEN_STEPS = 8, 10  # what the fingers take from end to end at 20 Hz, and what it takes to let go
PATIENCE = 80  # control steps of carrying after which being nearly there is enough
LOST = 0.06  # m between hand and grasp point: the object slipped out of the hand
TIPS, PALM = 0.012, 0.04  # m from the grip site down to the fingertips and up to the palm
BESIDE = 0.06  # m to either side of its way that a carried object may take up
MARGIN = 0.03  # m between what is carried and what it passes over
CLEAR = 0.01  # m around the open hand beyond which more room is no better
YAWS = np.deg2rad(np.arange(-75, 91, 15))


def _turned(yaw: float) -> np.ndarray:
    """Orientation of a hand that points down with its fingers opening along the world's y axis turned by ``yaw``."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.diag([1.0, -1.0, -1.0])


class PickAndPlace:
    """Drives one episode. ``sim`` is robosuite's environment right after the reset, its hand open.

    ``error`` [3], m in the world: how far beside its grasp point it takes hold.
    """

    def __init__(self, sim: Any, error: Sequence[float] = NO_ERROR) -> None:
        goals = sim.parsed_problem["goal_state"]
        if len(goals) != 1 or goals[0][0] not in ("in", "on") or goals[0][1] not in sim.objects_dict:
            raise ValueError(
                f"the task's goal {goals} is not to put one object in or on another: the scripted expert knows the "
                f"suites {list(SUITES)}"
            )
        self._sim, self._error = sim, np.asarray(error, np.float64)
        self._relation, self._object, self._place = goals[0]
        self._remember_open_hand()
        self._plan()
        self._phase, self._count = "reach", 0

    def action(self) -> np.ndarray:
        """float32 [7]: what to do in the present state. To be called once a control step."""
        to_grasp, carry = self._to_grasp(), self._carry()
        phase = self._next_phase(to_grasp, carry)
        self._count = self._count + 1 if phase == self._phase else 0
        if phase == "plan":
            self._plan()
            to_grasp, phase = self._to_grasp(), "reach"
        self._phase = phase
        if phase == "reach":
            height = min(HOVER, SLOPE * max(0.0, float(np.linalg.norm(to_grasp[:2])) - 0.012))
            return self._command(to_grasp + [0, 0, height], closed=False)
        if phase == "close":
            return self._command(to_grasp, closed=True)
        if phase == "carry":
            return self._command(carry, closed=True)
        return self._command(np.zeros(3), closed=False)

    def _next_phase(self, to_grasp: np.ndarray, carry: np.ndarray) -> str:
        if self._phase == "reach" and np.linalg.norm(to_grasp[:2]) < 0.01 and abs(to_grasp[2]) < 0.01:
            return "close"
        if self._phase == "reach" and self._count >= PATIENCE:
            return "plan"
        if self._phase == "close" and self._count >= CLOSE_STEPS:
            return "carry"
        if self._phase == "carry" and np.linalg.norm(to_grasp) > LOST:
            return "plan"
        if self._phase == "carry" and np.abs(carry).max() < (0.015 if self._count < PATIENCE else 0.04):
            return "open"
        if self._phase == "open" and self._count >= OPEN_STEPS:
            return "plan"  # without success, or the episode would be over
        return self._phase

    def _to_grasp(self) -> np.ndarray:
        """Displacement (m) from the grip site to where it should take hold."""
        point = self._position(self._object) + self._rotation(self._object) @ self._grasp
        return point + self._error - self._hand()[0]

    def _carry(self) -> np.ndarray:
        """Displacement (m) that the object should make: up, across once it is high enough, then down."""
        thing, goal = self._position(self._object), self._position(self._place)
        across = (goal - thing)[:2]
        distance = float(np.linalg.norm(across))
        bottom = thing[2] - self._depth
        up = self._highest_on_the_way() + MARGIN - bottom
        down = goal[2] - (bottom if self._relation == "on" else thing[2])
        lifted = 1.0 if distance < 0.02 else float(np.clip((0.06 - up) / 0.05, 0.0, 1.0))
        height = down + (up - down) * float(np.clip((distance - 0.015) / 0.03, 0.0, 1.0))
        return np.array([across[0] * lifted, across[1] * lifted, height])

    # -- where to take hold --------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Choose the grasp with the most room around the open hand, the least turned among equals.

        Sets ``_grasp`` (m, in the object's frame), ``_yaw`` (rad) and ``_depth``, how far the object reaches below its
        origin (m).
        """
        self._depth = -float(self._corners(self._object)[0][2])
        self._remember_obstacles()
        best = -np.inf
        for offset, yaw in self._candidates():
            score = self._room(self._position(self._object) + offset, yaw) - 0.002 * abs(yaw)
            if score > best:
                best, self._yaw = score, yaw
                self._grasp = self._rotation(self._object).T @ offset

    def _candidates(self) -> Iterator[tuple[np.ndarray, float]]:
        """Grasp points (m from the object's origin, world axes) and yaws of the hand."""
        if "bowl" in self._object:  # by the rim: one finger inside, one outside
            rotation = self._rotation(self._object)
            low, high = self._corners(self._object, rotation)
            for yaw in YAWS:
                for side in (1.0, -1.0):
                    outward = side * 0.95 * high[1] * (rotation.T @ [-np.sin(yaw), np.cos(yaw), 0.0])
                    yield rotation @ [outward[0], outward[1], (low[2] + high[2]) / 2], float(yaw)
        else:
            low, high = self._corners(self._object)
            middle = (low + high) / 2
            middle[2] = max(middle[2], low[2] + TIPS, high[2] - PALM)
            for yaw in YAWS:
                yield middle, float(yaw)

    def _remember_open_hand(self) -> None:
        model, data = self._sim.sim.model._model, self._sim.sim.data._data
        position, rotation = self._hand()
        names = [model.body(i).name for i in range(model.nbody)]
        of_hand = np.array([name.startswith("gripper0") or name == "robot0_right_hand" for name in names])
        of_robot = np.array([name.startswith(("gripper0", "robot0", "mount0")) for name in names])
        collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        self._hand_geoms = np.flatnonzero(of_hand[model.geom_bodyid] & collides)
        self._other_geoms = np.flatnonzero(~of_robot[model.geom_bodyid] & collides)
        self._hand_shape = [
            (rotation.T @ (data.geom_xpos[g] - position), rotation.T @ data.geom_xmat[g].reshape(3, 3))
            for g in self._hand_geoms
        ]

    def _remember_obstacles(self) -> None:
        """Boxes around everything else that collides: centre and half size (m, [n, 3], world axes).

        Remembered from before the grasp: something caught in the hand together with the object is no obstacle.
        """
        model, data = self._sim.sim.model._model, self._sim.sim.data._data
        body = self._sim.obj_body_id[self._object]
        others = self._other_geoms[model.body_rootid[model.geom_bodyid[self._other_geoms]] != body]
        rotations = data.geom_xmat[others].reshape(-1, 3, 3)
        self._centres = data.geom_xpos[others] + np.einsum("nij,nj->ni", rotations, model.geom_aabb[others, :3])
        self._halves = np.einsum("nij,nj->ni", np.abs(rotations), model.geom_aabb[others, 3:])

    def _highest_on_the_way(self) -> float:
        """Height (m) of the highest obstacle within reach of a straight line from object to destination."""
        start, end = self._position(self._object), self._position(self._place)
        top = end[2]
        for point in start + np.linspace(0, 1, 12)[:, None] * (end - start):
            aside = np.maximum(np.abs(point[:2] - self._centres[:, :2]) - self._halves[:, :2], 0.0)
            near = np.linalg.norm(aside, axis=1) < BESIDE
            top = max(top, (self._centres + self._halves)[near, 2].max(initial=top))
        return float(top)

    def _room(self, position: np.ndarray, yaw: float) -> float:
        """Least distance (m, at most ``CLEAR``, negative where they overlap) of an open hand there to all else."""
        import mujoco

        model, data = self._sim.sim.model._model, copy.copy(self._sim.sim.data._data)
        rotation, least, segment = _turned(yaw), CLEAR, np.zeros(6)
        for geom, (offset, turn) in zip(self._hand_geoms, self._hand_shape):
            data.geom_xpos[geom] = position + rotation @ offset
            data.geom_xmat[geom] = (rotation @ turn).ravel()
            reach = model.geom_rbound[geom] + model.geom_rbound[self._other_geoms] + CLEAR
            away = np.linalg.norm(data.geom_xpos[self._other_geoms] - data.geom_xpos[geom], axis=1)
            plane = model.geom_rbound[self._other_geoms] == 0
            for other in self._other_geoms[plane | (away < reach)]:
                least = min(least, mujoco.mj_geomDistance(model, data, geom, other, CLEAR, segment))
        return least

    # -- the simulation ------------------------------------------------------------------------------------------------

    def _command(self, move: np.ndarray, closed: bool) -> np.ndarray:
        error = _turned(self._yaw) @ self._hand()[1].T
        turn = 0.5 * np.array([error[2, 1] - error[1, 2], error[0, 2] - error[2, 0], error[1, 0] - error[0, 1]])
        action = np.concatenate([GAIN * move, TURN_GAIN * turn, [1.0 if closed else -1.0]])
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _hand(self) -> tuple[np.ndarray, np.ndarray]:
        """Position of the grip site and orientation of the hand (its z axis along the fingers)."""
        robot, data = self._sim.robots[0], self._sim.sim.data
        rotation = np.array(data.get_body_xmat(robot.robot_model.eef_name)).reshape(3, 3)
        return np.array(data.site_xpos[robot.eef_site_id]), rotation

    def _position(self, name: str) -> np.ndarray:
        return np.array(self._sim.object_states_dict[name].get_geom_state()["pos"])

    def _rotation(self, name: str) -> np.ndarray:
        return np.array(self._sim.sim.data.body_xmat[self._sim.obj_body_id[name]]).reshape(3, 3)

    def _corners(self, name: str, axes: np.ndarray = np.eye(3)) -> tuple[np.ndarray, np.ndarray]:  # noqa: B008
        """Lowest and highest corner (m, along the columns of ``axes``, from its origin) of the object's meshes."""
        model, data = self._sim.sim.model._model, self._sim.sim.data._data
        body = self._sim.obj_body_id[name]
        points = []
        for geom in np.flatnonzero(model.body_rootid[model.geom_bodyid] == model.body_rootid[body]):
            mesh = model.geom_dataid[geom]
            if mesh >= 0:
                first = model.mesh_vertadr[mesh]
                vertices = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
                points.append(vertices @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
        corners = (np.concatenate(points) - data.xpos[body]) @ axes
        return corners.min(0), corners.max(0)


class LiberoExpert(LiberoEnv):
    """``ExpertEnv``: a ``LiberoEnv`` that drives itself on the suites of ``SUITES``.

    ``grasp_error`` [x, y, z], m in the world: how far beside its grasp point it takes hold, as with a camera that was
    calibrated badly.
    """

    def __init__(
        self,
        num_slots: int = 1,
        suite: str = "libero_object",
        grasp_error: Sequence[float] = NO_ERROR,
        **options: Any,
    ) -> None:
        if suite not in SUITES:
            raise ValueError(f"env.suite is {suite!r}: there are scripted experts for {list(SUITES)}")
        check_grasp_error(grasp_error)
        super().__init__(num_slots=num_slots, suite=suite, **options)
        self._grasp_error = grasp_error
        self._expert: Optional[PickAndPlace] = None
        self._noise: Optional[ActionNoise] = None
        self._seed = 0

    def reset(self, slot: int, episode: Episode) -> Observation:
        observation = super().reset(slot, episode)
        self._expert = PickAndPlace(self._sim_env, self._grasp_error)
        self._seed = episode.seed
        self._noise = None
        return observation

    def expert_chunk(self, slots: list[int], length: int, noise: float = 0.0) -> list[ExpertChunk]:
        self._check_slots(slots)
        if noise and self._noise is None:
            self._noise = ActionNoise(self.spec, self._seed, noise)
        expert, disturb = self._expert, self._noise if noise else None
        if expert is None:
            raise RuntimeError(f"{self.spec.name}: expert_chunk before the reset")
        chunks = []
        for _ in slots:
            wanted = np.zeros((length, self.spec.action_dim), np.float32)

            def act(step: int, wanted: np.ndarray = wanted) -> np.ndarray:
                wanted[step] = expert.action()
                return disturb(wanted[step]) if disturb is not None else wanted[step]

            chunks.append(ExpertChunk(wanted, self._execute(length, act, record=False)))
        return chunks
