"""Fetching a checkpoint from the model hub."""

from __future__ import annotations

from pathlib import Path


def download(name: str) -> Path:
    """The local directory of hub repository ``name`` (owner/name): its JSON files and safetensors, nothing else."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the client has a dozen kinds of error, the user one question
        raise ValueError(
            f"{name!r} is not a directory here and could not be fetched from the hub: {type(error).__name__}: {error}"
        ) from error
