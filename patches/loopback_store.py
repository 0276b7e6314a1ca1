"""torch's store for a process group listens on every interface; for a group of one machine it listens on loopback."""

import functools
import ipaddress
import os
import socket
from datetime import timedelta

TARGET = "verl.utils.distributed"
VERSIONS = ">=0.9,<0.10"
WHY = "torch.distributed's TCPStore listens beyond loopback, asks for no password, and process groups trust it"
UPSTREAM = "torch/distributed/rendezvous.py _create_c10d_store; goes when it listens on MASTER_ADDR only"
SCHEME = "vla3-loopback"
_TIMEOUT = timedelta(minutes=30)  # torch's own default


def rendezvous(_url, timeout=_TIMEOUT, **_kwargs):
    """torch's ``env://``, with the listening socket bound to MASTER_ADDR."""
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listen = {}
    if rank == 0:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            listen = {"master_listen_fd": server.detach()}  # the store closes it
    yield TCPStore(host, port, world_size, rank == 0, timeout, **listen), rank, world_size


def _is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def apply(module):
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(SCHEME, rendezvous)
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second=None, backend=None):
        if "DIST_INIT_METHOD" in os.environ or not _is_loopback(os.environ.get("MASTER_ADDR", "")):
            return original(timeout_second=timeout_second, backend=backend)
        os.environ["DIST_INIT_METHOD"] = f"{SCHEME}://"  # verl hands it to torch as it is
        try:
            return original(timeout_second=timeout_second, backend=backend)
        finally:
            del os.environ["DIST_INIT_METHOD"]

    module.initialize_global_process_group_ray = initialize
