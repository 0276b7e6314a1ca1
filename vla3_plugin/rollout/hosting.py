"""Env workers inside their policy worker's process (``vla3.env.host: policy_worker``).

Observations reach the policy by reference, answers come back the same way; only finished trajectories leave the
process. ``EnvHost`` is the worker's side. ``HostedEnvWorker`` is what the driver holds: it has the remote methods of an
env worker that is an actor, so nobody who has one needs to know where it lives.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.rollout.env_worker import EnvWorker
from vla3_plugin.rollout.policy_client import NoAnswer

_CALLS = 4  # of one env worker at the same time, as many as an actor of its own takes


class LocalPolicy:
    """The policy of this process, asked by threads of env workers in it. ``act``: the lane's, ``version``: its weights'
    (-1: none yet)."""

    def __init__(self, server: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop

    def __str__(self) -> str:
        return "the policy of this process"

    @property
    def version(self) -> int:
        return self._server.served.version

    def act(
        self, inputs: dict[str, np.ndarray], keys: Sequence[NoiseKey], mode: str, timeout: float
    ) -> dict[str, np.ndarray]:
        """
        Raises:
            NoAnswer: within ``timeout`` seconds.
        """
        answer: Coroutine[Any, Any, dict[str, np.ndarray]] = self._server.lane.act(inputs, keys, mode)
        future: Future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        if not concurrent.futures.wait([future], timeout).done:
            future.cancel()
            raise NoAnswer
        return future.result()


class EnvHost:
    """The env workers that live in one policy worker, by rank. Called from its event loop, which it never blocks."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._workers: dict[int, EnvWorker] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}

    async def connect(
        self, rank: int, arguments: Sequence[Any], environ: Mapping[str, str], others: Sequence[Any]
    ) -> None:
        """Start env worker ``rank`` and let it ask this process's policy, or, while that holds no weights, ``others``.

        A second time: see ``EnvWorker.connect``.
        """
        loop = asyncio.get_running_loop()
        if rank not in self._workers:
            os.environ.update(environ)
            self._threads[rank] = ThreadPoolExecutor(_CALLS, thread_name_prefix=f"env{rank}")
            self._workers[rank] = await self._in_thread(rank, EnvWorker, rank, *arguments)
        await self._in_thread(rank, self._workers[rank].connect, [LocalPolicy(self._server, loop), *others])

    async def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """``method`` of env worker ``rank``. Whoever asks one that is still being started, as after this process was
        replaced, is told nothing."""
        if rank not in self._workers and method in ("drain_timeline", "close"):
            return []
        return await self._in_thread(rank, getattr(self._workers[rank], method), *arguments)

    async def _in_thread(self, rank: int, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads[rank], function, *arguments)


class HostedEnvWorker:
    """``actor``: the policy worker. ``arguments``: ``EnvWorker``'s, after its rank. ``environ``: what an actor of its
    own would find there. Both go along with ``connect``, since Ray starts a policy worker anew without them.
    """

    def __init__(self, actor: Any, rank: int, arguments: Sequence[Any], environ: Mapping[str, str]) -> None:
        self.actor, self.__ray_call__ = actor, actor.__ray_call__
        self.connect = _Remote(
            lambda policy_workers: actor.host_env.remote(rank, arguments, environ, policy_workers[1:])
        )
        for method in ("spec", "assign", "finished", "drain_timeline", "close"):
            setattr(self, method, _Remote(lambda *given, m=method: actor.call_env.remote(rank, m, *given)))


class _Remote:
    def __init__(self, remote: Any) -> None:
        self.remote = remote


def actor_of(worker: Any) -> Any:
    """The actor whose process an env worker, as the driver holds it, lives in."""
    return worker.actor if isinstance(worker, HostedEnvWorker) else worker


def class_of(worker: Any) -> str:
    """The name of that actor's class."""
    return "PolicyWorker" if isinstance(worker, HostedEnvWorker) else EnvWorker.__name__
