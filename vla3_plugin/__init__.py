"""Asynchronous reinforcement learning of vision-language-action models on verl."""

__version__ = "0.1.0"
