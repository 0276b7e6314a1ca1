"""Turning observations into chunks and episodes into stored trajectories."""
