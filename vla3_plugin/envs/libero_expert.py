"""A scripted expert with privileged state for LIBERO's pick-and-place suites (object and spatial).

A closed-loop state machine: every action is computed from the present poses of hand, object and destination, so that
it corrects disturbed actions, and it starts over when it loses the object. It needs no rendering.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SUITES = ("libero_object", "libero_spatial")

GAIN = 20.0  # action per metre: full speed (about 0.25 m/s) from 5 cm away
TURN_GAIN = 2.0  # action per radian
SLOPE = 4.0  # height kept per metre of horizontal error: the hand comes down in a steep funnel
CLOSE_STEPS, OPEN_STEPS = 8, 10  # what the fingers take from end to end at 20 Hz, and to let go
LOST = 0.06  # m between hand and grasp point: the object slipped out of the hand
TIPS, PALM = 0.012, 0.04  # m from the grip site down to the fingertips and up to the palm, about
MARGIN = 0.03  # m between what is carried and what it passes over
FINGERS = np.diag([1.0, -1.0, -1.0])  # orientation of the hand: pointing down, fingers opening along the world's y


class PickAndPlace:
    """Drives one episode. ``sim`` is robosuite's environment (``LiberoEnv.simulation``) right after the reset."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        goals = sim.parsed_problem["goal_state"]
        if len(goals) != 1 or goals[0][0] not in ("in", "on") or goals[0][1] not in sim.objects_dict:
            raise ValueError(
                f"the task's goal {goals} is not to put one object in or on another: the scripted expert knows the "
                f"suites {list(SUITES)}"
            )
        _, self._object, self._place = goals[0]
        self._container = self._place.replace("_contain_region", "")
        self._phase = "reach"
        self._count = 0
        low, high = self._extent(self._object)
        self._depth = -low[2]  # m from the object's origin down to its lowest point
        hollow = "bowl" in self._object
        # A solid object is taken at its middle, a bowl by the rim: one finger inside, one outside.
        self._grasp = np.array([0.0, 0.95 * high[1], 0.0]) if hollow else (low + high) / 2
        self._grasp[2] = max((low[2] + high[2]) / 2, low[2] + TIPS, high[2] - PALM)
        _, top = self._extent(self._container)
        rim = self._position(self._container)[2] + top[2]
        self._clear = max(rim, self._position(self._object)[2] - self._depth) + MARGIN  # lowest height to carry at

    def action(self) -> np.ndarray:
        """float32 [7]: what to do in the present state. To be called once a control step."""
        hand, thing, goal = self._hand(), self._position(self._object), self._position(self._place)
        grasp = thing + self._grasp
        self._advance(hand, grasp, thing, goal)
        self._count += 1
        if self._phase == "reach":
            aside = float(np.linalg.norm((grasp - hand)[:2]))
            height = min(0.12, SLOPE * max(0.0, aside - 0.012))
            return self._command(grasp + [0, 0, height] - hand, closed=False)
        if self._phase == "close":
            return self._command(grasp - hand, closed=True)
        if self._phase == "carry":
            return self._command(self._carry(thing, goal), closed=True)
        return self._command(np.zeros(3), closed=False)

    def _advance(self, hand: np.ndarray, grasp: np.ndarray, thing: np.ndarray, goal: np.ndarray) -> None:
        phase = self._phase
        if phase == "reach" and np.linalg.norm((grasp - hand)[:2]) < 0.01 and abs(grasp[2] - hand[2]) < 0.01:
            phase = "close"
        elif phase == "close" and self._count >= CLOSE_STEPS:
            phase = "carry"
        elif phase == "carry" and np.linalg.norm(grasp - hand) > LOST:
            phase = "reach"
        elif phase == "carry" and np.abs(self._carry(thing, goal)).max() < 0.015:
            phase = "open"
        elif phase == "open" and self._count >= OPEN_STEPS:
            phase = "reach"  # without success, or the episode would be over
        if phase != self._phase:
            self._phase, self._count = phase, 0

    def _carry(self, thing: np.ndarray, goal: np.ndarray) -> np.ndarray:
        """Displacement (m) that the object should make: up, across once it is high enough, then down."""
        across = (goal - thing)[:2]
        distance = float(np.linalg.norm(across))
        bottom = thing[2] - self._depth
        down = goal[2] - self._depth_at_goal() - bottom
        up = self._clear - bottom
        lifted = np.clip(1 - (up - 0.01) / 0.05, 0.0, 1.0) if distance > 0.02 else 1.0
        height = down + (up - down) * np.clip((distance - 0.015) / 0.03, 0.0, 1.0)
        return np.array([across[0] * lifted, across[1] * lifted, height])

    def _depth_at_goal(self) -> float:
        return 0.0

    def _command(self, move: np.ndarray, closed: bool) -> np.ndarray:
        body = self._sim.robots[0].robot_model.eef_name
        error = FINGERS @ self._sim.sim.data.get_body_xmat(body).reshape(3, 3).T
        turn = 0.5 * np.array([error[2, 1] - error[1, 2], error[0, 2] - error[2, 0], error[1, 0] - error[0, 1]])
        action = np.concatenate([GAIN * move, TURN_GAIN * turn, [1.0 if closed else -1.0]])
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _hand(self) -> np.ndarray:
        return np.array(self._sim.sim.data.site_xpos[self._sim.robots[0].eef_site_id])

    def _position(self, name: str) -> np.ndarray:
        return np.array(self._sim.object_states_dict[name].get_geom_state()["pos"])

    def _extent(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest corner (m, world axes, from the object's origin) of the object's meshes."""
        model, data = self._sim.sim.model._model, self._sim.sim.data._data
        body = self._sim.obj_body_id[name]
        points = []
        for geom in np.flatnonzero(model.body_rootid[model.geom_bodyid] == model.body_rootid[body]):
            mesh = model.geom_dataid[geom]
            if mesh >= 0:
                first = model.mesh_vertadr[mesh]
                vertices = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
                points.append(vertices @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
        corners = np.concatenate(points) - data.xpos[body]
        return corners.min(0), corners.max(0)
